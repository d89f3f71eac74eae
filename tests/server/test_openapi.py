import warnings

import pytest
from serving import Running, idle, wait_until

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")


def test_no_drawn_request_is_a_server_error(server: Running) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schemathesis itself raises warnings
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()

            @hypothesis.settings(
                max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
            )
            @hypothesis.given(case=operation.as_strategy())
            def check(case) -> None:
                if isinstance(case.body, dict) and "max_tokens" not in case.body:
                    case.body["max_tokens"] = 4
                response = case.call(timeout=120)
                assert response.status_code < 500, case.as_curl_command()

            check()
    wait_until(lambda: idle(server))
