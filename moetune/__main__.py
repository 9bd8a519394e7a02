"""`python -m moetune`, and the entry point of the `moetune` command."""

from moetune.cli import app


def main() -> None:
    """Run the command line and leave with its exit code."""
    app.run()


if __name__ == "__main__":
    main()
