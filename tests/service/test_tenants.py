"""A key reaches what its own tenant has and nothing of another's, by any route of the OpenAPI document."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import CheckpointReport
from octet.api_schemas.keys import KeyRole
from octet.service.app import create_app
from octet.service.db.tables import ExportRow, JobRow
from octet.service.settings import Settings
from octet.service.store.ids import new_id
from tests.kit.identity_provider import IdentityProvider, identity_provider
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step

Document = dict[str, Any]
Route = tuple[str, str]

KEYS = {name: f"the api key of {name} here" for name in ("one", "two", "")}
_CHECKPOINT, _EXPORT = "step_0000000001", "step_0000000001_bf16"
_UNKNOWN = "01kg9ys7g0zcz3435ebr0e41d0"

PLACES = {"job_id": "job", "comparison_id": "cmp", "key_id": "key"}
"""The parameters of paths that name what a tenant owns, with the kinds of their ids."""
LISTS = {("GET", "/v1/jobs"), ("GET", "/v1/rows"), ("GET", "/v1/comparisons"), ("GET", "/v1/keys"), ("GET", "/v1/audit")}
NAMED_BY_QUERY = {("GET", "/v1/stream")}
NEW_THINGS = {("POST", "/v1/jobs"), ("POST", "/v1/jobs/batch"), ("POST", "/v1/comparisons"), ("POST", "/v1/keys")}
OF_ALL_TENANTS = {("GET", "/metrics"), ("GET", "/internal/v1/prometheus/targets")}
BY_TENANT_WITHOUT_IDS = {("GET", "/v1/alerts"), ("GET", "/v1/usage")}
"""Lists that have something for everyone too: `test_alerts_api.py` and `test_quotas.py` look at what each tenant sees."""
OF_NO_TENANT = {
    *(("GET", path) for path in ("/healthz", "/readyz", "/v1/sign-in", "/v1/levels", "/v1/models", "/v1/pools", "/v1/loops")),
    *(("POST", path) for path in ("/v1/jobs/validate", "/v1/plans")),
}
BY_AN_ATTEMPTS_TOKEN = {("POST", "/internal/v1/attempts/{attempt_id}/reports")}


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    with identity_provider() as running:
        yield running


@pytest.fixture
def keyed(world: World, tmp_path: Path, provider: IdentityProvider) -> Iterator[TestClient]:
    keys = tuple(f"{name}:{key}" if name else key for name, key in KEYS.items())
    roles = provider.settings(**{f"{role} of {tenant}": f"{tenant}:{role}" for role in KeyRole for tenant in ("one", "two")})
    app = create_app(Settings(data_dir=tmp_path, api_keys=keys, **roles), database=world.database)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def owned(keyed: TestClient, world: World, spec_document: Document) -> dict[str, str]:
    """Make one of each for tenant one: a job that has a checkpoint and an export, a comparison, a key. Return ids by kind."""
    job = keyed.post("/v1/jobs", json=spec_document, headers=as_tenant("one")).json()
    world.dispatch()
    rank = world.rank_of(job["id"])
    rank.begin()
    rank.send(step(1), CheckpointReport(step=1, name=_CHECKPOINT, num_bytes=10, sha256="a" * 64, loss=2.0))
    with world.database.write() as session:
        now = world.clock.now()
        made = {"id": new_id("exp", now), "job_id": job["id"], "attempt_id": rank.order.attempt_id, "name": _EXPORT}
        form = {"format": "bf16", "layout": "compressed-tensors", "activations": "none"}
        session.add(ExportRow(**made, **form, step=1, created_at=now, num_bytes=10, sha256="b" * 64))
    asked = {"job": spec_document, "levels": ["fp32", "O1"], "seeds": 2}
    comparison = keyed.post("/v1/comparisons", json=asked, headers=as_tenant("one")).json()
    return {"job": job["id"], "cmp": comparison["id"], "key": stored_key(keyed, "viewer", "one")["id"]}


def as_tenant(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def stored_key(client: TestClient, role: str, tenant: str) -> Document:
    answer = client.post("/v1/keys", json={"name": role, "role": role, "tenant": tenant}, headers=as_tenant(""))
    assert answer.status_code == 201, answer.text
    made: Document = answer.json()
    return made


def headers_of(client: TestClient, role: str, tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {stored_key(client, role, tenant)['secret']}"}


def with_token(provider: IdentityProvider, role: str, tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {provider.token(f'{role} of {tenant}')}"}


def routes_of(document: Document) -> set[Route]:
    return {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}


def parameters_of(document: Document, route: Route) -> set[str]:
    """Return the parameters of a route's path that name what a tenant owns."""
    operation = document["paths"][route[1]][route[0].lower()]
    return {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"} & PLACES.keys()


def ask(client: TestClient, route: Route, ids: dict[str, str], headers: dict[str, str]) -> httpx.Response:
    method, path = route
    named = {name: ids[kind] for name, kind in PLACES.items()}
    filled = path.format(name=_EXPORT if "/exports/" in path else _CHECKPOINT, path="model.safetensors", **named)
    return client.request(method, filled, headers=headers, json={} if method == "PATCH" else None)


def without_ids(answer: httpx.Response, ids: dict[str, str]) -> tuple[int, str]:
    """Return what an answer says about any id."""
    text = answer.text
    for kind, id_ in ids.items():
        text = text.replace(id_, f"{kind}_ID")
    return answer.status_code, text


def test_the_matrix_has_every_route(openapi_document: Document) -> None:
    """A route that is added names what a tenant owns in its path, or has to be put into one of the sets above."""
    by_path = {route for route in routes_of(openapi_document) if parameters_of(openapi_document, route)}
    kinds = [by_path, LISTS, NAMED_BY_QUERY, NEW_THINGS, OF_ALL_TENANTS, BY_TENANT_WITHOUT_IDS, OF_NO_TENANT]
    kinds.append(BY_AN_ATTEMPTS_TOKEN)
    assert set().union(*kinds) == routes_of(openapi_document)
    assert sum(map(len, kinds)) == len(routes_of(openapi_document)), "a route is in two sets"


def test_what_another_tenant_has_is_404_on_every_route(
    keyed: TestClient, owned: dict[str, str], openapi_document: Document, provider: IdentityProvider
) -> None:
    """The answer is that to an id which does not exist, word for word. The owner's differs: the request reaches something."""
    routes = sorted(route for route in routes_of(openapi_document) if parameters_of(openapi_document, route))
    assert len(routes) >= 29
    unknown = {kind: f"{kind}_{_UNKNOWN}" for kind in owned}
    others = [as_tenant("two"), *(headers_of(keyed, role, "two") for role in ("viewer", "submitter", "admin", "scraper"))]
    others += [headers_of(keyed, role, "default") for role in ("viewer", "submitter", "scraper")]
    others += [with_token(provider, role, "two") for role in KeyRole]
    owner, owner_by_token = headers_of(keyed, "admin", "one"), with_token(provider, "admin", "one")
    owners = itertools.cycle([owner, owner_by_token])
    for route in routes:
        statuses = set()
        for headers in others:
            answer = without_ids(ask(keyed, route, owned, headers), owned)
            assert answer == without_ids(ask(keyed, route, unknown, headers), unknown), route
            statuses.add(answer[0])
        assert statuses == {403, 404}, route  # 403 by the role of some, whatever the id
        nothing = without_ids(ask(keyed, route, unknown, owner), unknown)
        assert nothing[0] == 404, route
        assert without_ids(ask(keyed, route, unknown, owner_by_token), unknown) == nothing, route
        assert without_ids(ask(keyed, route, owned, next(owners)), owned) != nothing, route


@ON_SQLITE
def test_a_stream_names_no_job_of_another_tenant(keyed: TestClient, owned: dict[str, str]) -> None:
    for part in ("points", "events", "logs"):
        for headers in (as_tenant("two"), headers_of(keyed, "viewer", "two")):
            answer = keyed.get(f"/v1/stream?{part}={owned['job']}", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    refused = keyed.get("/v1/stream?rows=tenant%3Done", headers=as_tenant("two"))
    assert refused.status_code == 422


def test_lists_have_what_a_tenant_owns(keyed: TestClient, owned: dict[str, str]) -> None:
    counts = {}
    for method, path in sorted(LISTS):
        owners = (headers_of(keyed, "admin", "one"), headers_of(keyed, "admin", "two"), as_tenant(""))
        pages = [keyed.request(method, path, headers=headers).json() for headers in owners]
        counts[path] = [len(page["data"]) for page in pages]
        assert pages[1].get("total", 0) == 0
        assert not [each for each in pages[1]["data"] if each["tenant"] != "two"]
    for path in ("/v1/keys", "/v1/audit"):
        of_one, of_two, of_all = counts.pop(path)
        assert of_one > 0, path
        assert of_all > of_one + (of_two if path == "/v1/audit" else -1), path
    assert counts == {"/v1/jobs": [1, 0, 1], "/v1/rows": [1, 0, 1], "/v1/comparisons": [1, 0, 1]}
    named = keyed.get(f"/v1/rows?id={owned['job']}", headers=as_tenant("two")).json()
    assert (named["total"], named["data"]) == (0, [])
    assert keyed.get("/v1/rows?tenant=one", headers=as_tenant("")).json()["total"] == 1
    refused = keyed.get("/v1/rows?tenant=one", headers=as_tenant("two"))
    assert (refused.status_code, refused.json()["errors"][0]["allowed"]) == (422, "two")


@pytest.mark.parametrize("order", ["name", "evaluation", "created", "-created"])
def test_no_list_says_where_another_tenant_s_job_would_stand_in_it(
    keyed: TestClient, world: World, owned: dict[str, str], spec_document: Document, order: str
) -> None:
    """Behind which of one's own jobs it stood would show its name, or its loss, in a dozen requests."""
    own = [
        keyed.post("/v1/jobs", json=spec_document | {"name": name}, headers=as_tenant("two")).json()["id"]
        for name in ("a", "zz")
    ]
    with world.database.write() as session:
        for job_id, loss in zip([own[0], owned["job"], own[1]], (1.0, 2.0, 3.0), strict=True):
            session.get_one(JobRow, job_id).best_evaluation_loss = loss
    unknown = f"{owned['job'][:-1]}{'0' if owned['job'][-1] != '0' else '1'}"
    pages = [
        keyed.get(f"/v1/rows?sort={order}&after={job_id}", headers=as_tenant("two")).json()
        for job_id in (owned["job"], unknown)
    ]
    assert pages[0] == pages[1]


@ON_SQLITE
def test_what_is_new_belongs_to_the_tenant_of_the_key(keyed: TestClient, spec_document: Document) -> None:
    bodies = {
        "/v1/jobs": spec_document,
        "/v1/jobs/batch": {"job": spec_document, "changes": [{}]},
        "/v1/comparisons": {"job": spec_document, "levels": ["fp32", "O1"], "seeds": 2},
        "/v1/keys": {"name": "ada", "role": "viewer"},
    }
    assert {("POST", path) for path in bodies} == NEW_THINGS
    for tenant in ("one", "two"):
        headers = headers_of(keyed, "admin", tenant)
        for path, body in bodies.items():
            # The same idempotency key in each tenant: what the other one has is no replay.
            answer = keyed.post(path, json=body, headers=headers | {"Idempotency-Key": f"first-of-{path[4:]}"})
            assert (answer.status_code, made(answer)["tenant"]) == (201, tenant)
            assert "Idempotent-Replayed" not in answer.headers
            if path != "/v1/keys":
                again = keyed.post(path, json=body, headers=headers | {"Idempotency-Key": f"first-of-{path[4:]}"})
                assert (made(again)["id"], again.headers["Idempotent-Replayed"]) == (made(answer)["id"], "true")


def made(answer: httpx.Response) -> Document:
    """Return what an answer shows of what is new, the first of a batch."""
    document: Document = answer.json()
    first: Document = document.get("jobs", [document])[0]
    return first


@ON_SQLITE
def test_series_of_all_tenants_are_for_scrapers_and_the_operator(keyed: TestClient) -> None:
    for method, path in sorted(OF_ALL_TENANTS):
        for role in ("viewer", "submitter", "admin"):
            assert keyed.request(method, path, headers=headers_of(keyed, role, "one")).status_code == 403
        assert keyed.request(method, path, headers=as_tenant("one")).status_code == 403
        for headers in (headers_of(keyed, "scraper", "one"), headers_of(keyed, "admin", "default"), as_tenant("")):
            assert keyed.request(method, path, headers=headers).status_code == 200
