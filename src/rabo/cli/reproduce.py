"""`rabo reproduce`: the options of a request, as a command."""

import inspect
from typing import Annotated, Any

import typer

from rabo.reproduction.request import Request, known, options_of
from rabo.runs.terminal import console, guarded


def reproduce(**options: Any) -> None:
    """Run the paper's tables and figures, or studies beyond them, and put them beside the paper's.

    Runs that are there already are not done again; one that was cut goes on.
    """
    request = Request(**options)
    advice = "; to go on, give the same command again"
    code = guarded(lambda: request.perform(_say), request.folder, advice)
    if code:
        raise typer.Exit(code)


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _parameters() -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    name = Annotated[str, typer.Argument(help=known())]
    found = [inspect.Parameter("name", kind, annotation=name)]
    for option, plain, default, text in options_of(Request):
        plain = list[str] if default == [] else plain
        plain = plain | None if default is None else plain
        annotation = Annotated[plain, typer.Option(help=text)]
        found.append(inspect.Parameter(option, kind, default=default, annotation=annotation))
    return found


reproduce.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
reproduce.__annotations__ = {p.name: p.annotation for p in _parameters()}
