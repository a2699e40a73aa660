"""``python -m moonlet.cli``: the command without the installed script."""

from moonlet.cli.main import main

main()
