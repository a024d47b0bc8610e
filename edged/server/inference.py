"""``edged.v1.Inference``: checks a request, hands it to the engine, and streams what comes back."""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from edged.errors import DeadlineError, EdgedError, FailedPreconditionError, InvalidArgumentError
from edged.log import get_logger, request_scope
from edged.metrics.requests import CHAT, TEXT
from edged.server.answers import AnswerWriter, merged
from edged.server.constraint_checks import ConstraintChecker
from edged.server.constraints import read_constraint
from edged.server.embedding import Embedder
from edged.server.identity import caller_of, traceparent_of
from edged.server.responses import started_response
from edged.server.validation import (
    check_priority,
    check_prompt_length,
    check_prompt_size,
    check_session,
    check_text,
    check_token_count,
    check_token_ids,
    resolve_stops,
)
from edged.v1 import inference_pb2
from edged.worker.messages import Finished, Started, Submit, Tokens
from edged.worker.state import State

if TYPE_CHECKING:
    from edged.config import LimitsConfig
    from edged.metrics.requests import Observation, RequestMetrics
    from edged.server.answers import AnswerFormat
    from edged.server.methods import AnyContext
    from edged.server.served_models import ServedModel, ServedModels
    from edged.server.thermal import ThermalGate
    from edged.worker.supervisor import Supervisor

log = get_logger("server")


class Inference:
    """The inference service. All methods run in the event loop.

    Args:
        models: Tokenizers, templates and defaults of the models.
        supervisor: Runs the engine process.
        limits: What one request may carry.
        metrics: Counts and times requests.
        gate: Holds requests back while the board is hot.
    """

    def __init__(
        self,
        models: ServedModels,
        supervisor: Supervisor,
        limits: LimitsConfig,
        metrics: RequestMetrics,
        gate: ThermalGate,
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._gate = gate
        self._supervisor = supervisor
        self._limits = limits
        self._constraints = ConstraintChecker(limits)
        self._embedder = Embedder(models, supervisor, metrics, gate, limits)
        self.finished = 0
        """Requests that were answered to the end."""
        self.failed = 0
        """Requests that ended with an error."""

    @property
    def state(self) -> State:
        """What a request finds: an engine that serves is of no use before prompts can be tokenized."""
        state = self._supervisor.state
        return State.LOADING if state is State.SERVING and not self._models.loaded else state

    async def Generate(  # noqa: N802 - the service's name
        self, request: inference_pb2.GenerateRequest, context: AnyContext
    ) -> None:
        """Stream the answer to one prompt."""
        arrived = time.monotonic()
        remaining = context.time_remaining()
        deadline = None if remaining is None else arrived + remaining
        request_id = secrets.token_hex(8)
        operation = CHAT if request.WhichOneof("prompt") == "chat" else TEXT
        observed = self._metrics.observe(request_id, operation, traceparent_of(context))
        with request_scope(request_id), observed:
            try:
                model = self._models.find(request.model)
                caller = caller_of(context)
                submit, answer_format = await self._check(request, model, request_id, deadline)
                submit = msgspec.structs.replace(
                    submit, tenant=caller.tenant, session=request.session, arrived=time.monotonic()
                )
                observed.submit(submit)
                async with self._gate.place(submit.model, deadline):
                    await self._stream(submit, answer_format, caller.client, context, observed)
            except EdgedError as error:
                self.failed += 1
                log.info(
                    "request failed", code=error.code.name, reason=error.message, seconds=_since(arrived)
                )
                raise
            except BaseException as error:
                # The client went away or its deadline passed (CancelledError), or a fault of edged's own.
                self.failed += 1
                log.info("request ended early", reason=type(error).__name__, seconds=_since(arrived))
                raise
            self.finished += 1

    async def Embed(  # noqa: N802 - the service's name
        self, request: inference_pb2.EmbedRequest, context: AnyContext
    ) -> inference_pb2.EmbedResponse:
        """Vectors of texts."""
        return await self._embedder.embed(request, context)

    async def Tokenize(  # noqa: N802 - the service's name
        self, request: inference_pb2.TokenizeRequest, _context: AnyContext
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a chat."""
        model = self._models.find(request.model)
        self._check_size(request, model)
        prompt = await model.read_prompt(request, add_special_tokens=not request.no_special_tokens)
        return inference_pb2.TokenizeResponse(token_ids=prompt.token_ids, rendered=prompt.rendered)

    async def Detokenize(  # noqa: N802 - the service's name
        self, request: inference_pb2.DetokenizeRequest, _context: AnyContext
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        model = self._models.find(request.model)
        check_token_count(request.token_ids, model.context_length, "token_ids")
        check_token_ids(request.token_ids, model.vocabulary, "token_ids")
        text = await model.detokenize(request.token_ids, skip_special_tokens=not request.keep_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    def start(self) -> None:
        """Start what requests need, in the background."""
        self._constraints.start()

    async def close(self) -> None:
        """End what was started for requests."""
        await self._constraints.close()

    async def _check(
        self,
        request: inference_pb2.GenerateRequest,
        model: ServedModel,
        request_id: str,
        deadline: float | None,
    ) -> tuple[Submit, AnswerFormat]:
        """The engine's form of a request, and what becomes of its answer.

        Raises:
            EdgedError: The request can never work, or its deadline has passed.
        """
        check_priority(request.priority)
        check_session(request.session)
        constraint = read_constraint(request, self._limits)
        sampling = await model.resolve_sampling(request.sampling)
        if sampling.n > 1 and sampling.temperature == 0:
            raise InvalidArgumentError(
                f"sampling.n is {sampling.n} at temperature 0, where all answers are the same; set a temperature",
                field="sampling.n",
            )
        kind = request.WhichOneof("prompt")
        if kind == "text":
            check_text(request.text)
        self._check_size(request, model)
        prompt = await model.read_prompt(request)
        check_prompt_length(len(prompt.token_ids), model.context_length, kind or "prompt")
        stops = resolve_stops(
            request.stops,
            limits=self._limits,
            prompt_tokens=len(prompt.token_ids),
            context_length=model.context_length,
            vocabulary=model.vocabulary,
            eos_token_ids=model.eos_token_ids,
        )
        answer_format, required = model.formats.read(request, prompt.rendered)
        constraint = required or constraint
        grammar = None if constraint is None else await self._constraints.check(constraint)
        if grammar is not None and not stops.eos_token_ids:
            raise FailedPreconditionError(
                f"model {model.name} has no end-of-sequence token, which a constrained answer needs; name one in its "
                "generation_config.json"
            )
        if deadline is not None and deadline <= time.monotonic():
            raise DeadlineError("the deadline passed before the request reached the engine; allow more time")
        submit = Submit(
            request_id=request_id,
            model=model.name,
            token_ids=prompt.token_ids,
            sampling=sampling,
            stops=stops,
            deadline=deadline,
            priority=request.priority,
            skip_special_tokens=not request.keep_special_tokens,
            kept_token_ids=answer_format.kept_token_ids,
            grammar=grammar,
            speculation=not request.no_speculation,
        )
        return submit, answer_format

    def _check_size(
        self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, model: ServedModel
    ) -> None:
        check_prompt_size(
            request,
            prompt_size=self._models.prompt_size,
            context_length=model.context_length,
            longest_token=model.longest_token,
        )

    async def _stream(
        self,
        submit: Submit,
        answer_format: AnswerFormat,
        client: str,
        context: AnyContext,
        observed: Observation,
    ) -> None:
        """Send everything that the engine says of one request."""
        streams = self._supervisor.submit_all(submit, client)
        started = False
        try:
            writers = [AnswerWriter(answer_format, submit.request_id, index) for index in range(len(streams))]
            async with aclosing(merged(streams)) as events:
                async for index, message in events:
                    observed.note(message)
                    if isinstance(message, Tokens):
                        await context.write(writers[index].chunk(message))
                    elif isinstance(message, Started):
                        if not started:
                            await context.write(started_response(message, submit))
                        started = True
                    elif isinstance(message, Finished):
                        await context.write(writers[index].finished(message))
                        log.info(
                            "request finished",
                            model=submit.model,
                            reason=message.reason,
                            prompt_tokens=message.prompt_tokens,
                            generated_tokens=message.generated_tokens,
                            seconds=_since(observed.arrived),
                        )
        finally:
            for stream in streams:
                stream.cancel()  # after the end it does nothing


def _since(start: float) -> float:
    """Seconds since ``start``, rounded for the log."""
    return round(time.monotonic() - start, 3)
