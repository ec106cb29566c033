"""``staleflow completion``: what a shell needs to complete verbs, options and keys."""

import click

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_STALEFLOW_COMPLETE"
NO_SPACE = """
_staleflow_completion_keys() {
    _staleflow_completion "$@"
    [[ ${#COMPREPLY[@]} -gt 0 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o nosort -F _staleflow_completion_keys staleflow
"""
"""bash puts a blank behind what it completed, which a key that waits for its value must not have."""


@click.command("completion", short_help="Print a script that completes verbs, options and keys.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> int:
    """Print the completion script of SHELL. Verbs, options, files, and keys with the values that they may have.

    \b
    Examples:
      staleflow completion bash > ~/.local/share/bash-completion/completions/staleflow
      staleflow completion zsh > ~/.zfunc/_staleflow      (with ~/.zfunc in fpath, before compinit)
      staleflow completion fish > ~/.config/fish/completions/staleflow.fish
    """
    from click.shell_completion import get_completion_class

    from staleflow.cli.main import cli

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"this click does not know {shell}")
    script = found(cli, {}, "staleflow", VARIABLE).source_template % {
        "complete_func": "_staleflow_completion",
        "complete_var": VARIABLE,
        "prog_name": "staleflow",
    }
    click.echo(script.strip() + (NO_SPACE if shell == "bash" else ""))
    return 0
