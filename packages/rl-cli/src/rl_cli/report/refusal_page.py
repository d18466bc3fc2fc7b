"""The page that a browser gets when `rl watch` refuses it: why, and what to do.

It has no script and nothing of the request, so that a link cannot put words into it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import string

from rl_distributed.access.door import Refusal

__all__ = ["refusal_page"]

_COMPLETE = (
    "Copy the complete address that rl watch printed: it ends in ?token= and the "
    "token. Where it ends in ?token=KEY, put your own key in place of KEY."
)
_NEW_KEY = (
    "Ask whoever runs rl watch for a new key (rl keys create --name NAME --role "
    "viewer), and put it in place of the old one in the address."
)
_REASONS = {
    "key_missing": ("The address has no key", _COMPLETE),
    "key_malformed": (
        "The key in the address is not complete",
        f"{_COMPLETE} A chat or mail program may have cut it off.",
    ),
    "key_unknown": (
        "The key in the address is not one of this page",
        f"{_COMPLETE} A token is good until its rl watch ends, and the next one prints "
        "another.",
    ),
    "key_expired": ("Your key has expired", _NEW_KEY),
    "key_revoked": ("Your key was revoked", _NEW_KEY),
    "rate": ("Your key has sent too many requests", "Wait, and load the page again."),
    "other_origin": (
        "Another page has asked for this one",
        "Copy the address, and open it in a new tab.",
    ),
    "other_host": (
        "The page was opened by another name than that of this machine",
        "Open it as 127.0.0.1 or localhost. From another machine, forward the port: "
        "ssh -L 8790:127.0.0.1:8790 HOST.",
    ),
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:36em;margin:4em auto;"
    "padding:0 1em}h1{font-size:1.4em}small{opacity:.7}"
)
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_PAGE = string.Template(
    f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>rl watch: refused</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>$title</h1>
<p>$remedy</p>
<p><small>rl watch refused the request: status $status, $reason.</small></p>
</body>
</html>
"""
)


def refusal_page(refusal: Refusal) -> str:
    """Return the HTML page of a refused request.

    Args:
        refusal: Why it was refused.
    """
    title, remedy = _REASONS.get(
        refusal.reason, ("The request was refused", str(refusal))
    )
    return _PAGE.substitute(
        title=html.escape(title),
        remedy=html.escape(remedy),
        status=refusal.status,
        reason=html.escape(refusal.reason),
    )
