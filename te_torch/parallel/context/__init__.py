"""Context parallelism: one sequence over several ranks. So far what a program does to its data: data.py."""
