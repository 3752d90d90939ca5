"""``python -m simplefsdp``: the command ``simplefsdp``."""

from simplefsdp.cli.main import main

if __name__ == "__main__":
    main()
