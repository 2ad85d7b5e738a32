"""``python -m bench``: run the benchmark, compare two runs, or write a run's figures into the README."""

from importlib import import_module

import click

# Command -> its module, imported by the command that runs: comparing two files needs no torch.
COMMANDS = {"run": "bench.run", "compare": "bench.compare", "readme": "bench.readme"}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        return command


@click.command(cls=Commands, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Numbers one can trust: our encoder and kernels beside everything else that is installed."""


if __name__ == "__main__":
    main(prog_name="python -m bench")
