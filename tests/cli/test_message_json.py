from __future__ import annotations

from edged.cli.message_json import as_object
from edged.v1 import control_pb2, inference_pb2


def test_every_field_is_there_and_numbers_are_numbers():
    status = control_pb2.GetStatusResponse(
        state=control_pb2.STATE_SERVING,
        uptime_seconds=1.5,
        models=[control_pb2.ModelStatus(name="a", state=control_pb2.STATE_LOADING, prompt_tokens=2**40)],
        ledger=control_pb2.Ledger(
            rows=[control_pb2.LedgerRow(name="weights", bytes=2**40)], total_bytes=2**40
        ),
        addresses=["unix:/x", "127.0.0.1:1"],
    )
    content = as_object(status)
    assert set(content) == {field.name for field in status.DESCRIPTOR.fields}
    assert content["state"] == "serving"
    assert content["uptime_seconds"] == 1.5
    assert content["requests_failed"] == 0
    assert content["last_error"] == ""
    assert content["addresses"] == ["unix:/x", "127.0.0.1:1"]
    assert content["models"][0]["state"] == "loading"
    assert content["models"][0]["prompt_tokens"] == 2**40
    assert content["ledger"] == {
        "rows": [{"name": "weights", "bytes": 2**40, "note": ""}],
        "total_bytes": 2**40,
        "budget_bytes": 0,
    }


def test_enum_words_lose_the_name_of_their_type():
    finished = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_END_OF_SEQUENCE)
    assert as_object(finished)["reason"] == "end_of_sequence"
    assert as_object(control_pb2.GetStatusResponse(state=77))["state"] == "unknown"  # of a later version
