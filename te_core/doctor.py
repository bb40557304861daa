"""`python -m te_core.doctor`: what te_core finds on this machine, and what works here."""

from te_core.tools.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
