"""HTML pages of one file each: how their templates are read, and the frame that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


def template(package: str, name: str, **filters: Callable[[Any], str]) -> Template:
    """A template of a package's folder ``templates``.

    It may extend ``document.html``, with the blocks ``title`` and ``content``; that reads
    ``whole_page``: whether it is a document for a browser or a part of one for a notebook.

    Args:
        package: Name of the package, ``"tpu_core.report"``.
        name: Of the file.
        filters: Functions of ``{{ value | name }}``.

    Returns:
        The template. It escapes text, and raises for a name that it is not given.

    Example:
        >>> page = html_template("tpu_core.report", "page.html", seconds=lambda s: f"{s:.2f} s")
    """
    import jinja2

    loaders = [jinja2.PackageLoader(p, "templates") for p in (package, __package__)]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= filters
    return environment.get_template(name)
