"""Writes the Grafana dashboard: ``python deploy/grafana/build.py``. The JSON beside it is what people import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLACE = Path(__file__).with_name("edged.json")
_MODEL = 'instance=~"$instance",gen_ai_request_model=~"$model"'
_INSTANCE = 'instance=~"$instance"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Median and 95 % of a histogram, by model."""
    return [
        (
            f"histogram_quantile({part}, sum by (gen_ai_request_model, le) (rate({metric}_bucket{{{_MODEL}}}[$__rate_interval])))",
            f"{{{{gen_ai_request_model}}}} {name}",
        )
        for part, name in ((0.5, "median"), (0.95, "95 %"))
    ]


def rate(metric: str, by: str, labels: str = _MODEL) -> list[tuple[str, str]]:
    """What a counter grows a second."""
    return [
        (
            f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))",
            f"{{{{{by.rsplit(', ', maxsplit=1)[-1]}}}}}",
        )
    ]


PANELS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # row or panel: (title, kind, unit, queries)
    ("Service", "row", "", []),
    ("State", "stat", "", [(f"edged_state{{{_INSTANCE}}} == 1", "{{instance}} {{state}}")]),
    ("Up", "stat", "s", [(f"edged_uptime_seconds{{{_INSTANCE}}}", "{{instance}}")]),
    ("Engine restarts", "stat", "short", [(f"edged_engine_restarts_total{{{_INSTANCE}}}", "{{instance}}")]),
    (
        "Requests a second",
        "timeseries",
        "reqps",
        rate("edged_requests_finished_total", "gen_ai_response_finish_reason")
        + rate("edged_requests_failed_total", "error_type"),
    ),
    ("Latency", "row", "", []),
    ("Time to first token (TTFT)", "timeseries", "s", quantiles("gen_ai_server_time_to_first_token_seconds")),
    ("Between two messages (ITL)", "timeseries", "s", quantiles("edged_inter_token_latency_seconds")),
    (
        "Time per output token (TPOT)",
        "timeseries",
        "s",
        quantiles("gen_ai_server_time_per_output_token_seconds"),
    ),
    ("Queue time", "timeseries", "s", quantiles("edged_queue_time_seconds")),
    ("Request duration", "timeseries", "s", quantiles("gen_ai_server_request_duration_seconds")),
    (
        "Step time by tokens in a step",
        "timeseries",
        "s",
        [
            (
                " / ".join(
                    f"sum by (bucket) (rate({metric}{{{_MODEL}}}[$__rate_interval]))"
                    for metric in ("edged_bucket_step_seconds_total", "edged_bucket_steps_total")
                ),
                "up to {{bucket}}",
            )
        ],
    ),
    ("Load", "row", "", []),
    (
        "Tokens a second",
        "timeseries",
        "short",
        [
            (
                f"sum by (gen_ai_request_model) (rate({metric}{{{_MODEL}}}[$__rate_interval]))",
                f"{{{{gen_ai_request_model}}}} {name}",
            )
            for metric, name in (
                ("edged_prompt_tokens_total", "prompt"),
                ("edged_cached_tokens_total", "from the cache"),
                ("edged_generated_tokens_total", "generated"),
                ("edged_drafted_tokens_total", "drafted"),
                ("edged_accepted_tokens_total", "drafts accepted"),
            )
        ],
    ),
    (
        "Tokens of finished requests",
        "timeseries",
        "short",
        rate("gen_ai_server_token_usage_tokens_total", "gen_ai_token_type"),
    ),
    (
        "Requests",
        "timeseries",
        "short",
        [
            (f"{metric}{{{_MODEL}}}", f"{{{{gen_ai_request_model}}}} {name}")
            for metric, name in (
                ("edged_requests_running", "running"),
                ("edged_requests_waiting", "waiting"),
                ("edged_requests_waiting_to_cool", "waiting to cool"),
                ("edged_requests_suspended", "suspended"),
            )
        ],
    ),
    (
        "KV pages",
        "timeseries",
        "short",
        [
            (f"{metric}{{{_MODEL}}}", f"{{{{gen_ai_request_model}}}} {name}")
            for metric, name in (
                ("edged_kv_pages", "all"),
                ("edged_kv_pages_free", "free"),
                ("edged_kv_pages_cached", "cached"),
                ("edged_kv_pages_pinned", "pinned"),
            )
        ],
    ),
    ("Memory", "row", "", []),
    ("Ledger", "timeseries", "bytes", [(f"edged_ledger_bytes{{{_INSTANCE}}}", "{{row}}")]),
    ("Resident", "timeseries", "bytes", [(f"edged_resident_bytes{{{_INSTANCE}}}", "{{process}}")]),
    ("Board", "row", "", []),
    (
        "Temperatures",
        "timeseries",
        "celsius",
        [(f"edged_board_temperature_celsius{{{_INSTANCE}}}", "{{zone}}")],
    ),
    (
        "Thermal margin",
        "timeseries",
        "celsius",
        [
            (f"edged_board_thermal_margin_celsius{{{_INSTANCE}}}", "{{instance}}"),
            (f"edged_admission_capped{{{_INSTANCE}}}", "admission capped"),
        ],
    ),
    ("Power", "timeseries", "watt", [(f"edged_board_power_watts{{{_INSTANCE}}}", "{{rail}}")]),
    ("Clocks", "timeseries", "hertz", [(f"edged_board_clock_hertz{{{_INSTANCE}}}", "{{clock}}")]),
    (
        "Over-current events",
        "timeseries",
        "short",
        [(f"increase(edged_board_throttle_events_total{{{_INSTANCE}}}[$__rate_interval])", "{{cause}}")],
    ),
    ("Access", "row", "", []),
    ("Calls denied a second", "timeseries", "short", rate("edged_calls_denied_total", "code", _INSTANCE)),
    (
        "Certificate ends in",
        "stat",
        "s",
        [(f"edged_certificate_expiry_timestamp_seconds{{{_INSTANCE}}} - time()", "{{instance}}")],
    ),
]


def variable(name: str, query: str) -> dict[str, Any]:
    """A choice at the top of the dashboard."""
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard as Grafana 10 and later take it."""
    panels: list[dict[str, Any]] = []
    x = y = 0
    for number, (title, kind, unit, queries) in enumerate(PANELS, 1):
        width, height = (24, 1) if kind == "row" else (8, 5) if kind == "stat" else (12, 8)
        if kind == "row" or x + width > 24:
            x, y = 0, y + (8 if panels else 0)
        panel: dict[str, Any] = {
            "id": number,
            "title": title,
            "type": kind,
            "gridPos": {"x": x, "y": y, "w": width, "h": height},
        }
        if kind == "row":
            panel |= {"collapsed": False, "panels": []}
            y += 1
        else:
            x += width
            panel |= {
                "datasource": _SOURCE,
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(ord("A") + index),
                        "datasource": _SOURCE,
                        "expr": query,
                        "legendFormat": legend,
                    }
                    for index, (query, legend) in enumerate(queries)
                ],
            }
        panels.append(panel)
    return {
        "uid": "edged",
        "title": "edged",
        "tags": ["edged", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                variable("instance", "label_values(edged_info, instance)"),
                variable("model", "label_values(edged_kv_pages, gen_ai_request_model)"),
            ]
        },
        "panels": panels,
    }


if __name__ == "__main__":
    PLACE.write_text(json.dumps(dashboard(), indent=1) + "\n", "utf-8")
