"""The route by which a client learns where people sign in. It needs no key: it is asked by those who have none."""

from fastapi import APIRouter

from octet.api_schemas.keys import SignIn
from octet.service.deps import AppContextDep
from octet.service.errors import NotFound
from octet.service.http.problems import answers

router = APIRouter(tags=["keys"])


@router.get("/v1/sign-in", operation_id="get_sign_in", responses=answers(404, 422))
async def get_sign_in(context: AppContextDep) -> SignIn:
    """Show the identity provider whose tokens are accepted in the place of an API key; 404 if there is none."""
    settings = context.settings
    if not settings.oidc_issuer:
        raise NotFound("this server has no identity provider (OCTET_OIDC_ISSUER): use an API key, by OCTET_API_KEY")
    return SignIn(
        issuer=settings.oidc_issuer,
        client_id=settings.oidc_client_id or settings.oidc_audience,
        audience=settings.oidc_audience,
        scopes=tuple(settings.oidc_scopes.split()),
    )
