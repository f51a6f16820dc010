"""``torchrun ... -m torchscout.preflight``."""

from torchscout.preflight.command import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
