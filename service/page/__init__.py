"""The page that a person looks at: static ES modules, a pure client of the REST API.

It is in `static/` as it is sent: no build, no package, nothing of others. All of it is read once, when it is mounted. Its
address holds a hash of its content, so that a browser keeps it for good and never mixes two versions.
"""

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

STATIC = Path(__file__).parent / "static"
VIEWS = ("/", "/jobs/{job_id}", "/compare", "/comparisons/{comparison_id}", "/submit", "/cluster")
"""The addresses of the page's views. Each is the same document, and its modules look at the address."""

_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FOR_GOOD = {**_POLICY, "Cache-Control": "public, max-age=31536000, immutable"}
_ASK_AGAIN = {**_POLICY, "Cache-Control": "no-cache"}


def mount(router: Router) -> None:
    """Add the page's routes to an app's router."""
    files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in sorted(STATIC.rglob("*.*"))}
    version = hashlib.sha256(b"\0".join([part for name in files for part in (name.encode(), files[name])])).hexdigest()[:12]
    document = files.pop("index.html").replace(b"{assets}", f"/assets/{version}".encode())

    async def view(_request: Request) -> Response:
        return Response(document, media_type=_TYPES[".html"], headers=_ASK_AGAIN)

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if request.path_params["version"] != version or name not in files:
            raise HTTPException(404)
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=_FOR_GOOD)

    for path, endpoint in [*[(path, view) for path in VIEWS], ("/assets/{version}/{name:path}", asset)]:
        router.routes.append(Route(path, endpoint, methods=["GET"]))
