"""Completion of commands and their options in a shell."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SCRIPT = """# Completion of {program}: bash; zsh after 'autoload bashcompinit; bashcompinit'.
_{name}() {{
    local words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _{name} {program}
"""


def completion_script(program: str, commands: Mapping[str, Callable[[Sequence[str]], Any]]) -> str:
    """Return a script that completes a program's commands and the options in their ``--help``."""
    cases = []  # one of a plug-in that cannot say its options is completed by its name
    for name, command in commands.items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit, Exception):
            command(["--help"])
        options = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.getvalue()))
        cases.append(f'            {name}) words="{" ".join(options)}" ;;')
    return _SCRIPT.format(
        program=program,
        name=program.replace("-", "_"),
        commands=" ".join(commands),
        cases="\n".join(cases),
    )
