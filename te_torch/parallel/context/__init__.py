"""Context parallelism: one sequence over several ranks. Groups: groups.py; what a program does to its data: data.py."""
