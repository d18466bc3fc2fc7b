"""`python -m rl_cli` is the same as `rl`."""

from rl_cli.main import main

if __name__ == "__main__":
    main()
