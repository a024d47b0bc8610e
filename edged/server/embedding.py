"""``Embed``: each input is a request of its own to the engine, as many at a time as the model has places."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edged.decoding.pooling import LAST, MEAN, Embedding
from edged.decoding.sampling import Sampling
from edged.decoding.stops import Stops
from edged.errors import DeadlineError, EdgedError, InvalidArgumentError, UnsupportedError
from edged.log import get_logger, request_scope
from edged.metrics.requests import EMBEDDINGS
from edged.server.identity import caller_of, traceparent_of
from edged.server.validation import check_priority, check_prompt_size
from edged.v1 import inference_pb2
from edged.worker.messages import Finished, Submit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.config import LimitsConfig
    from edged.metrics.requests import Observation, RequestMetrics
    from edged.server.methods import AnyContext
    from edged.server.served_models import ServedModel, ServedModels
    from edged.server.thermal import ThermalGate
    from edged.worker.supervisor import Supervisor

MOST_INPUTS = 256
_POOLINGS = {inference_pb2.POOLING_LAST: LAST, inference_pb2.POOLING_MEAN: MEAN}
_NUMBERS = {pooling: number for number, pooling in _POOLINGS.items()}

log = get_logger("server")


class Embedder:
    """Makes vectors.

    Args:
        models: Tokenizers of the models.
        supervisor: Runs the engine process.
        metrics: Counts and times requests.
        gate: Holds requests back while the board is hot.
        limits: What one client may have at once.
    """

    def __init__(
        self,
        models: ServedModels,
        supervisor: Supervisor,
        metrics: RequestMetrics,
        gate: ThermalGate,
        limits: LimitsConfig,
    ) -> None:
        self._most_at_once = limits.requests_per_client or MOST_INPUTS
        self._models = models
        self._supervisor = supervisor
        self._metrics = metrics
        self._gate = gate

    async def embed(
        self, request: inference_pb2.EmbedRequest, context: AnyContext
    ) -> inference_pb2.EmbedResponse:
        """The vectors of all inputs.

        Raises:
            EdgedError: The request can never work, one of its inputs fails, or its deadline passes.
        """
        arrived = time.monotonic()
        remaining = context.time_remaining()
        deadline = None if remaining is None else arrived + remaining
        model = self._models.find(request.model)
        embedding = embedding_of(request, model)
        check_priority(request.priority)
        if not 1 <= len(request.inputs) <= MOST_INPUTS:
            raise InvalidArgumentError(
                f"inputs has {len(request.inputs)} entries; give 1 to {MOST_INPUTS}, and more in further calls",
                field="inputs",
            )
        prompts = [await self._read(each, index, model) for index, each in enumerate(request.inputs)]
        submits = iter(
            [
                Submit(
                    request_id=secrets.token_hex(8),
                    model=model.name,
                    token_ids=token_ids,
                    sampling=Sampling(),
                    stops=Stops(max_tokens=1),
                    deadline=deadline,
                    priority=request.priority,
                    tenant=caller_of(context).tenant,
                    speculation=False,
                    embedding=embedding,
                )
                for token_ids in prompts
            ]
        )
        places = min(model.max_sequences, len(prompts), self._most_at_once)
        found: dict[int, inference_pb2.Embedding] = {}
        numbered = enumerate(submits)
        tasks = [asyncio.create_task(self._work(numbered, found, context)) for _ in range(places)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return inference_pb2.EmbedResponse(
            embeddings=[found[index] for index in range(len(prompts))],
            model=model.name,
            pooling=_NUMBERS[embedding.pooling],
        )

    async def _work(
        self,
        numbered: Iterator[tuple[int, Submit]],
        found: dict[int, inference_pb2.Embedding],
        context: AnyContext,
    ) -> None:
        """Have one input after the other made a vector, as long as there are some."""
        for index, submit in numbered:
            if submit.deadline is not None and submit.deadline <= time.monotonic():
                raise DeadlineError(
                    f"the deadline passed before inputs[{index}] reached the engine; allow more time"
                )
            observed = self._metrics.observe(submit.request_id, EMBEDDINGS, traceparent_of(context))
            with request_scope(submit.request_id), observed:
                observed.submit(submit)
                arrived = msgspec.structs.replace(submit, arrived=time.monotonic())
                async with self._gate.place(submit.model, submit.deadline):
                    found[index] = await self._one(arrived, caller_of(context).client, observed)

    async def _one(self, submit: Submit, client: str, observed: Observation) -> inference_pb2.Embedding:
        stream = self._supervisor.submit(submit, client)
        async with stream:
            async for message in stream:
                observed.note(message)
                if isinstance(message, Finished):
                    return inference_pb2.Embedding(
                        values=np.frombuffer(message.embedding, "<f4").tolist(),
                        prompt_tokens=message.prompt_tokens,
                        cached_tokens=message.cached_tokens,
                    )
        raise AssertionError("a stream ends with Finished or an error")

    async def _read(self, given: inference_pb2.EmbedInput, index: int, model: ServedModel) -> tuple[int, ...]:
        """Token ids of one input.

        Raises:
            InvalidArgumentError: It is missing, empty, too long or has ids that the model does not know.
        """
        place = f"inputs[{index}]"
        kind = given.WhichOneof("input")
        if kind is None:
            raise InvalidArgumentError(f"{place} is empty; set text or token_ids", field=place)
        as_prompt = inference_pb2.GenerateRequest()
        if kind == "text":
            as_prompt.text = given.text
        else:
            as_prompt.token_ids.CopyFrom(given.token_ids)
        try:
            check_prompt_size(
                as_prompt,
                prompt_size=self._models.prompt_size,
                context_length=model.context_length,
                longest_token=model.longest_token,
            )
            token_ids = (await model.read_prompt(as_prompt, leaves_room=False)).token_ids
        except EdgedError as error:
            raise InvalidArgumentError(
                f"{place}: {error.message}", field=f"{place}.{error.field or kind}"
            ) from None
        if not 1 <= len(token_ids) <= model.context_length:
            raise InvalidArgumentError(
                f"{place} has {len(token_ids)} tokens; give at least one and at most {model.context_length} "
                "(context_length): cut the text into pieces",
                field=f"{place}.{kind}",
            )
        return token_ids


def embedding_of(request: inference_pb2.EmbedRequest, model: ServedModel) -> Embedding:
    """What is wanted of each input.

    Raises:
        UnsupportedError: The model makes no vectors.
        InvalidArgumentError: A pooling of no meaning.
    """
    if model.embeddings == "none":
        raise UnsupportedError(
            f"model {model.name} serves no embeddings: set models[].embeddings to last or mean in the configuration, "
            "whichever it was trained for",
            field="model",
        )
    pooling = _POOLINGS.get(request.pooling)
    if pooling is None and request.pooling != inference_pb2.POOLING_UNSPECIFIED:
        raise InvalidArgumentError(
            f"pooling is {request.pooling}; use POOLING_LAST, POOLING_MEAN or leave it out", field="pooling"
        )
    normalize = not request.HasField("normalize") or request.normalize
    return Embedding(pooling or model.embeddings, normalize)
