"""`/docs` is Swagger UI from a package: every file is this server's, and the policy allows nothing else."""

import re

from fastapi.testclient import TestClient

from tests.service.databases import ON_SQLITE


@ON_SQLITE
def test_the_reference_needs_no_other_host(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    links = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(links) == 4
    for link in links:
        answer = client.get(link)
        assert (answer.status_code, answer.headers["content-security-policy"]) == (200, policy), link
    assert "<script>" not in page.text
    assert "style=" not in page.text
    assert '"/openapi.json"' in client.get("/docs/start.js").text
    assert client.get("/docs/other.js").status_code == 404
