"""`python -m torchscout`: the `scout` command, where it is not on the path."""

from torchscout.cli.main import app

__all__ = ["app"]

if __name__ == "__main__":
    app(prog_name="python -m torchscout")
