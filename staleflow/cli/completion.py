"""``staleflow completion``: shell completion of verbs, options and configuration keys."""

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
"""Addition for bash, which appends a blank to each completion; ``KEY=`` must not get one because its value follows."""


@click.command("completion", short_help="Print a script that completes verbs, options and keys.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> int:
    """Print the completion script for SHELL. It completes verbs, options, files, keys and the values of keys.

    \b
    Examples:
      staleflow completion bash > ~/.local/share/bash-completion/completions/staleflow
      staleflow completion zsh > ~/.zfunc/_staleflow      (with ~/.zfunc in fpath, before compinit)
      staleflow completion fish > ~/.config/fish/completions/staleflow.fish
    """
    from click.shell_completion import get_completion_class

    from staleflow.cli.main import cli

    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise click.ClickException(f"the installed click does not support {shell}")
    script = completion_class(cli, {}, "staleflow", VARIABLE).source_template % {
        "complete_func": "_staleflow_completion",
        "complete_var": VARIABLE,
        "prog_name": "staleflow",
    }
    click.echo(script.strip() + (NO_SPACE if shell == "bash" else ""))
    return 0
