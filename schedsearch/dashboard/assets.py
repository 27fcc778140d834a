"""The dashboard's page: template, styles, scripts and data joined to one HTML text.

The server and the report use the same text, and it refers to nothing outside itself. The JavaScript modules under
`static/js` are joined to one module script: their imports are removed, and `export` is removed from their declarations.
That works as long as every import has the form `import { a, b } from "./file.js";`, every export stands before its
declaration, and no two modules use the same name at their top level. `joined_modules` checks this.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
ENTRY_MODULE = "app.js"

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)
_EXPORTED = re.compile(r"^export (?:async )?(?:function\*?|const|let|class) ([A-Za-z_$][\w$]*)", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) ([A-Za-z_$][\w$]*)", re.MULTILINE)


def content_security_policy(nonce: str, *, live: bool) -> str:
    """The Content-Security-Policy of a page whose script and style elements carry `nonce`.

    A live page may fetch from its own server; a report may fetch nothing. The result fits both a header and a meta
    element. Browsers ignore `frame-ancestors` in a meta element and say so, so the server adds it to its header.
    """
    server = "'self'" if live else "'none'"
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src 'nonce-{nonce}'",
            f"style-src 'nonce-{nonce}'",
            f"connect-src {server}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def live_page(nonce: str, boot: Mapping[str, object]) -> str:
    """The page for the server.

    Args:
        nonce: random text of letters, digits, `-` and `_`, new for each answer; the header's policy names it too.
        boot: small JSON object for the page's start: {"version": str, "title": str}.
    """
    return _page(nonce, {**boot, "live": True}, data="", live=True)


def report_page(answers: Mapping[str, object], nonce: str, boot: Mapping[str, object]) -> str:
    """The whole dashboard as one file that works from disk.

    Args:
        answers: the JSON of every path that the page may ask for, such as {"overview": ..., "task/<id>": ...}. The live
            page asks the server for the same paths under /api/.
        nonce: random text of letters, digits, `-` and `_`.
        boot: as in `live_page`.
    """
    text = json.dumps(answers, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()
    return _page(nonce, {**boot, "live": False}, data=packed, live=False)


def inline_json(value: object) -> str:
    """JSON that can stand inside a script element: no text in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _page(nonce: str, boot: Mapping[str, object], *, data: str, live: bool) -> str:
    if not re.fullmatch(r"[\w-]+", nonce):
        raise ValueError(f"nonce is {nonce!r}; it may have letters, digits, '-' and '_' only")
    policy = (
        "" if live else f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy(nonce, live=False)}">'
    )
    parts = {
        "POLICY": policy,
        "NONCE": nonce,
        "STYLE": (STATIC / "app.css").read_text(encoding="utf-8"),
        "BOOT": inline_json(boot),
        "DATA": data,
        "ECHARTS": _script_text((STATIC / "vendor" / "echarts.min.js").read_text(encoding="utf-8")),
        "MODULES": _script_text(joined_modules()),
    }
    template = (STATIC / "index.html").read_text(encoding="utf-8")
    return re.sub(r"@@([A-Z]+)@@", lambda match: parts[match[1]], template)


def _script_text(text: str) -> str:
    """Script that can stand inside a script element; in strings and regular expressions `<\\/` means `</`."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


@cache
def joined_modules() -> str:
    """All modules that ENTRY_MODULE needs, as the text of one module script; imported modules come first.

    Raises:
        ValueError: two modules use one name at their top level, a module imports a name that the other does not
            export, or an import or export has another form than this module can join.
    """
    sources: dict[str, str] = {}
    owners: dict[str, str] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"modules import one another in a circle: {' -> '.join((*path, name))}")
        if name in sources:
            return
        text = (STATIC / "js" / name).read_text(encoding="utf-8")
        for imported in _IMPORT.finditer(text):
            visit(imported[2], (*path, name))
            exported = set(_EXPORTED.findall(sources[imported[2]]))
            if missing := {part.strip() for part in imported[1].split(",") if part.strip()} - exported:
                raise ValueError(f"{name} imports {', '.join(sorted(missing))}, which {imported[2]} does not export")
        if wrong := re.search(r"^(?:import|export)\b.*", _joined(text), re.MULTILINE):
            raise ValueError(f"{name}: cannot join {wrong[0]!r}")
        for declared in _TOP_LEVEL.findall(text):
            if declared in owners:
                raise ValueError(f"{declared} is declared by both {owners[declared]} and {name}")
            owners[declared] = name
        sources[name] = text

    visit(ENTRY_MODULE, ())
    return "\n".join(f"// {name}\n{_joined(text)}" for name, text in sources.items())


def _joined(text: str) -> str:
    return _EXPORT.sub("", _IMPORT.sub("", text))
