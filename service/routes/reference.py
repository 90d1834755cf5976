"""The API's reference for people at `/docs`: Swagger UI over `/openapi.json`.

Its files come from the package `fastapi-swagger`, so the page needs no other host. No script or style stands inside of a page.
"""

from importlib.resources import files

from fastapi import APIRouter, Response

from octet.service.errors import NotFound

router = APIRouter(prefix="/docs", include_in_schema=False)

_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Octet API</title>
<link rel="icon" href="/docs/favicon-32x32.png">
<link rel="stylesheet" href="/docs/swagger-ui.css">
<script src="/docs/swagger-ui-bundle.js" defer></script>
<script src="/docs/start.js" defer></script>
</head>
<body><div id="reference"></div></body>
</html>
"""
_START = 'SwaggerUIBundle({url: "/openapi.json", dom_id: "#reference", deepLinking: true, validatorUrl: null});\n'


@router.get("")
async def page() -> Response:
    """Answer with the page."""
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


@router.get("/start.js")
async def start() -> Response:
    """Answer with the script that starts Swagger UI."""
    return Response(_START, media_type="text/javascript", headers=_HEADERS)


@router.get("/{name}")
def asset(name: str) -> Response:
    """Answer with a file of Swagger UI."""
    if name not in _ASSETS:
        raise NotFound(f"there is nothing at /docs/{name}")
    content = files("fastapi_swagger").joinpath("resources", name).read_bytes()
    headers = _HEADERS | {"Cache-Control": "public, max-age=86400"}
    return Response(content, media_type=_ASSETS[name], headers=headers)
