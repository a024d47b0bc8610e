"""The gRPC server: services, listeners and limits put together."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry, ProcessCollector

from edged.log import get_logger
from edged.metrics.collector import DaemonCollector
from edged.metrics.exporter import Exporter
from edged.metrics.requests import RequestMetrics
from edged.metrics.traces import Tracer
from edged.server.control import Control
from edged.server.guard import Guard
from edged.server.health import INFERENCE, WHOLE_DAEMON, Health, model_service
from edged.server.inference import Inference
from edged.server.listeners import Listeners
from edged.server.methods import service_handler
from edged.server.reflection import reflection_handler
from edged.server.served_models import ServedModels
from edged.server.thermal import ThermalGate
from edged.v1 import control_pb2, inference_pb2
from edged.worker.state import State

if TYPE_CHECKING:
    from edged.config import Config
    from edged.memory.ledger import Ledger
    from edged.worker.supervisor import Supervisor

_STOP_SECONDS = 2.0

log = get_logger("server")
_HANDSHAKE_MILLISECONDS = 10_000


class Server:
    """Serves the public API.

    Args:
        config: The configuration.
        supervisor: Runs the engine process.
        ledger: The static budget, for status.
    """

    def __init__(self, config: Config, supervisor: Supervisor, ledger: Ledger) -> None:
        self._config = config
        self._supervisor = supervisor
        self._ledger = ledger
        self._listeners = Listeners(config.listen)
        self._models = ServedModels(config)
        self._started = time.monotonic()
        self._gate = ThermalGate(
            config.thermal, config.queue.capacity, queued=lambda model: supervisor.report_of(model).waiting
        )
        self._registry = CollectorRegistry()
        self._tracer = Tracer(config.traces.endpoint) if config.traces.endpoint else None
        self._metrics = RequestMetrics(self._registry, self._tracer)
        self._exporter = Exporter(config.metrics.listen, self._registry) if config.metrics.listen else None
        self._inference = Inference(self._models, supervisor, config.limits, self._metrics, self._gate)
        self._health = Health(tuple(model.name for model in config.models))
        self._control: Control | None = None
        self._servers: list[grpc.aio.Server] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """What clients connect to."""
        return self._listeners.addresses

    @property
    def state(self) -> State:
        """What a request would find now."""
        return self._inference.state

    def reload(self) -> str:
        """Look now at the files that are looked at by themselves; what is wrong with one, or nothing."""
        return self._listeners.look()

    def claim(self) -> None:
        """Hold the places to listen at, before anything is loaded.

        Raises:
            ListenError: A place is in use, missing, forbidden or too long.
        """
        self._listeners.claim()

    async def start(self) -> None:
        """Answer calls. Until the models are loaded, GetStatus and health say so and Generate refuses.

        Raises:
            ListenError: A place cannot be bound.
        """
        servers = []
        for place in self._listeners.places:
            guard = Guard(
                place.listener.address,
                place.scopes,
                place.tokens,
                demand_token=place.tokens is not None,
                on_denied=self._metrics.note_denied,
            )
            server = grpc.aio.server(options=_options(self._config), interceptors=[guard])
            place.listener.bind(server)
            servers.append(server)
        control = self._control = Control(
            self._config,
            self._supervisor,
            self._inference,
            self._ledger,
            self.addresses,
            gate=self._gate,
            metrics_address=lambda: "" if self._exporter is None else self._exporter.address,
        )
        services = [
            (inference_pb2.DESCRIPTOR.services_by_name["Inference"], self._inference),
            (control_pb2.DESCRIPTOR.services_by_name["Control"], control),
            (health_pb2.DESCRIPTOR.services_by_name["Health"], self._health),
        ]
        handlers = [service_handler(descriptor, servicer) for descriptor, servicer in services]
        handlers.append(reflection_handler(descriptor.full_name for descriptor, _ in services))
        for server in servers:
            server.add_generic_rpc_handlers(tuple(handlers))
        self._supervisor.subscribe(self.update_health)
        self._inference.start()
        await self._start_metrics()
        for server in servers:
            await server.start()
            self._servers.append(server)

    async def _start_metrics(self) -> None:
        """Look at the board, and serve the metrics where the configuration says.

        Raises:
            ListenError: The place cannot be bound.
        """
        self._gate.start()
        if self._exporter is None:
            return
        certificates = self._listeners.certificates
        collector = DaemonCollector(
            self._supervisor,
            self._ledger,
            state=lambda: self.state,
            board=lambda: self._gate.board,
            admission=self._gate,
            certificate_expiry=(lambda: None) if certificates is None else certificates.expires_at,
            uptime=lambda: time.monotonic() - self._started,
        )
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        await self._exporter.start()
        log.info("metrics", address=self._exporter.address)

    async def load_models(self) -> None:
        """Read tokenizers and templates, in a thread.

        Raises:
            CheckpointError: A model folder is damaged.
        """
        await asyncio.to_thread(self._models.load)
        self.update_health()

    def update_health(self, *_: object) -> None:
        """Take the health from the supervisor's state."""
        serving = self.state is State.SERVING
        statuses = {WHOLE_DAEMON: serving, INFERENCE: serving}
        for model in self._config.models:
            report = self._supervisor.models.get(model.name)
            statuses[model_service(model.name)] = serving and report is not None and report.state == "ready"
        self._health.set_serving(statuses)

    async def stop(self) -> None:
        """Stop answering: what is being sent is sent, then the places are given up."""
        self._health.close()
        self._gate.close()
        if self._control is not None:
            self._control.close()
        await asyncio.gather(*(server.stop(_STOP_SECONDS) for server in self._servers))
        if self._exporter is not None:
            await self._exporter.stop()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        self._models.close()
        await self._inference.close()
        self._listeners.close()


def _options(config: Config) -> list[tuple[str, int]]:
    """GRPC's own limits."""
    return [
        ("grpc.max_receive_message_length", config.message_size),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", config.limits.concurrent_streams),
        ("grpc.max_metadata_size", config.limits.header_size),
        ("grpc.absolute_max_metadata_size", 2 * config.limits.header_size),
        ("grpc.max_allowed_incoming_connections", config.limits.connections),
        # Who connects and says nothing, or byte after byte, is let go; the default is two minutes.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MILLISECONDS),
        # Pings that come more often than below end the connection at the third.
        ("grpc.http2.max_ping_strikes", 2),
        # With it, several daemons could share a port, each with a part of the clients.
        ("grpc.so_reuseport", 0),
        # A client that is gone without a word (a radio link, a suspended laptop) is noticed within half a minute.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
