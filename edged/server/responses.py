"""The engine's messages as responses of ``Generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.server.sampling import sampling_in_force
from edged.v1 import inference_pb2, types_pb2

if TYPE_CHECKING:
    from edged.worker.messages import Finished, Started, Submit, TokenLogprobs, Tokens

_REASONS = {
    "end_of_sequence": inference_pb2.FINISH_REASON_END_OF_SEQUENCE,
    "stop_string": inference_pb2.FINISH_REASON_STOP_STRING,
    "stop_token": inference_pb2.FINISH_REASON_STOP_TOKEN,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "constraint": inference_pb2.FINISH_REASON_CONSTRAINT,
}


def started_response(message: Started, submit: Submit) -> inference_pb2.GenerateResponse:
    """The first response: what the request was resolved to."""
    return inference_pb2.GenerateResponse(
        started=inference_pb2.Started(
            request_id=submit.request_id,
            prompt_tokens=message.prompt_tokens,
            cached_tokens=message.cached_tokens,
            sampling=sampling_in_force(submit.sampling),
            max_tokens=submit.stops.max_tokens,
            model=submit.model,
        )
    )


def chunk_response(message: Tokens) -> inference_pb2.GenerateResponse:
    """One step's text and tokens."""
    return inference_pb2.GenerateResponse(
        chunk=inference_pb2.Chunk(
            text=message.text,
            token_ids=message.token_ids,
            step_seconds=message.step_seconds,
            logprobs=map(_logprobs, message.logprobs),
        )
    )


def _logprobs(token: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    top = zip(token.top_ids, token.top, token.texts, strict=True)
    return inference_pb2.TokenLogprobs(
        logprob=token.logprob,
        top=[
            inference_pb2.TopLogprob(token_id=token_id, logprob=logprob, text=text)
            for token_id, logprob, text in top
        ],
    )


def finished_response(message: Finished) -> inference_pb2.GenerateResponse:
    """The last response."""
    timings = message.timings
    return inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(
            reason=_REASONS[message.reason],
            matched_stop=message.matched_stop,
            matched_token_id=message.matched_token_id,
            text=message.text,
            usage=types_pb2.Usage(
                prompt_tokens=message.prompt_tokens,
                cached_tokens=message.cached_tokens,
                generated_tokens=message.generated_tokens,
                drafted_tokens=message.drafted_tokens,
                accepted_tokens=message.accepted_tokens,
            ),
            timings=types_pb2.Timings(
                queue_seconds=timings.queue,
                prefill_seconds=timings.prefill,
                decode_seconds=timings.decode,
                steps=timings.steps,
            ),
        )
    )
