"""``python -m ernie_vit`` and the command ``ernie-vit``."""

import sys
from importlib.util import find_spec

# What the extra ``cli`` installs beyond the library's own needs.
_NEEDED = ("click", "rich", "matplotlib", "PIL", "safetensors", "transformers")


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"ernie-vit: not installed: {', '.join(missing)}; pip install 'ernie-vit[cli]' brings them")
    from ernie_vit.cli import cli

    cli(prog_name="ernie-vit")


if __name__ == "__main__":
    main()
