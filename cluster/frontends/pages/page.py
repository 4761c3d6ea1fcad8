"""A page of HTML with its style and its script inside, under a policy that admits nothing else."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from tandem.cluster.frontends.http.monitoring import Handler
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope

HTML = "text/html; charset=utf-8"
STATUS_PAGE, DOCS_PAGE = "/", "/docs"
NAMES = {STATUS_PAGE: ("status", "tandem"), DOCS_PAGE: ("docs", "API of tandem")}


def pages(*paths: str, metrics: bool) -> dict[str, Handler]:
    """Returns the handler of each path. metrics: whether /metrics is at the same address."""
    there = ("metrics",) * metrics + ("docs",) * (DOCS_PAGE in paths)
    return {path: Page(*NAMES[path], there).serve for path in paths}


class Page:
    """Made of the files beside this module: NAME.html, its body, and NAME.js, after common.css and common.js. It holds
    no fact about the cluster: its script asks for them, with the key that its reader has given."""

    def __init__(self, name: str, title: str, there: Sequence[str] = ()) -> None:
        """there: what else is at its address: metrics, docs."""
        facts = "".join(f" data-{one}" for one in there)
        style, script = _read("common.css"), _read("common.js") + _read(f"{name}.js")
        self._content = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{title}</title><link rel="icon" href="data:,"><style>{style}</style></head>\n'
            f"<body{facts}>\n{_read(f'{name}.html')}<script>{script}</script></body></html>\n"
        ).encode()
        self._headers = {
            "content-security-policy": "; ".join(
                [
                    "default-src 'none'",
                    f"script-src '{_digest(script)}'",
                    f"style-src '{_digest(style)}'",
                    "connect-src 'self'",
                    "img-src data:",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                    "require-trusted-types-for 'script'",
                ]
            ),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache",
        }

    async def serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        await reply.content(200, self._content, HTML, self._headers)


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Returns the digest by which a policy names the text between two tags."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
