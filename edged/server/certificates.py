"""TLS of the TCP listener: certificate, key and client authorities, taken anew at the next handshake when they change."""

from __future__ import annotations

import os
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from edged.errors import ListenError
from edged.log import get_logger

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from edged.config import TlsConfig

_SIZE_LIMIT = 2**20
_LOOK_SECONDS = 0.5
_DAY = 86400.0

log = get_logger("server")


@dataclass(frozen=True)
class Identity:
    """What a handshake shows and asks for, as PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


class Certificates:
    """The files of ``listen.tls``.

    gRPC asks :meth:`_fetch` at each handshake, in a thread of its own. Files that do not fit together (one of them is
    being replaced, the key is another one's) are left and the old ones stay; connections that stand are not touched.

    Args:
        config: With a certificate and its key.
    """

    def __init__(self, config: TlsConfig) -> None:
        assert config.certificate is not None  # noqa: S101 - the configuration's rules
        assert config.key is not None  # noqa: S101
        self._certificate, self._key, self._client_ca = config.certificate, config.key, config.client_ca
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._seen: object = None
        self._identity: Identity | None = None

    @property
    def demands_certificates(self) -> bool:
        """Whether clients must show a certificate."""
        return self._client_ca is not None

    def check(self) -> None:
        """Read the files.

        Raises:
            ListenError: One is missing, is no PEM, or the key is not the certificate's.
        """
        self._seen = self._signature()
        self._identity = self._load()

    def credentials(self) -> grpc.ServerCredentials:
        """What gRPC listens with.

        Raises:
            ListenError: As :meth:`check`.
        """
        if self._identity is None:
            self.check()
        assert self._identity is not None  # noqa: S101 - just loaded
        fetch: Any = self._fetch  # the stubs forget that None means no change
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._identity),
            fetch,
            require_client_authentication=self.demands_certificates,
        )

    def expires_at(self) -> float | None:
        """When the certificate in use ends, as seconds of :func:`time.time`; None before it was read."""
        return None if self._identity is None else not_after(self._identity.certificate).timestamp()

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Gives new certificates to the next handshake; None: those in use stay. Never raises."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < _LOOK_SECONDS:
                return None
            self._looked = now
            seen = self._signature()
            if seen is None or seen == self._seen:
                return None
            self._seen = seen
            try:
                identity = self._load()
            except ListenError as error:
                log.error("the new certificate is not taken, the old one stays", reason=error.message)  # noqa: TRY400
                return None
            if identity == self._identity:
                return None
            self._identity = identity
            log.info("certificate read again", valid_until=not_after(identity.certificate).isoformat())
            return _configuration(identity)

    def _signature(self) -> object:
        """Changes when a file does; None where one is missing."""
        paths = [path for path in (self._certificate, self._key, self._client_ca) if path is not None]
        try:
            return tuple(
                (s.st_mtime_ns, s.st_size, s.st_ino, s.st_ctime_ns) for s in (p.stat() for p in paths)
            )
        except OSError:
            return None

    def _load(self) -> Identity:
        certificate = _read(self._certificate, "listen.tls.certificate")
        key = _read(self._key, "listen.tls.key")
        client_ca = None if self._client_ca is None else _read(self._client_ca, "listen.tls.client_ca")
        _check_pair(certificate, key, self._certificate, self._key)
        if client_ca is not None:
            try:
                ssl.create_default_context().load_verify_locations(cadata=client_ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise ListenError(
                    f"listen.tls.client_ca: {self._client_ca} holds no certificate that can be read ({error})",
                    field="listen.tls.client_ca",
                ) from error
        return Identity(certificate, key, client_ca)


def not_after(pem: bytes) -> datetime:
    """When the first certificate of a PEM text ends.

    Raises:
        ValueError: There is none.
    """
    from cryptography import x509  # noqa: PLC0415 - several megabytes that a daemon without TLS does not need

    return x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], root_certificates=identity.client_ca
    )


def _read(path: Path, field: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_SIZE_LIMIT)
    except OSError as error:
        raise ListenError(
            f"{field}: {path} cannot be read ({error.strerror}); correct the path, or its rights for user {os.getuid()}",
            field=field,
        ) from error


def _check_pair(certificate: bytes, key: bytes, certificate_path: Path, key_path: Path) -> None:
    """Hold key and certificate to each other; gRPC itself would only fail every handshake.

    Raises:
        ListenError: They do not fit.
    """

    def no_password() -> str:
        raise ValueError("the key is encrypted")

    # OpenSSL reads files: these exist in memory alone, and are what was read, whatever becomes of the paths.
    descriptors = [os.memfd_create("edged-tls", os.MFD_CLOEXEC) for _ in range(2)]
    try:
        for descriptor, data in zip(descriptors, (certificate, key), strict=True):
            os.write(descriptor, data)
        first, second = (f"/proc/self/fd/{descriptor}" for descriptor in descriptors)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(first, second, password=no_password)
        ends = not_after(certificate).timestamp()
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ListenError(
            f"listen.tls: certificate {certificate_path} and key {key_path} do not make a pair in PEM: {error}",
            field="listen.tls.certificate",
        ) from error
    finally:
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
    left = ends - time.time()
    if left < 0:
        log.error("the certificate has expired", path=str(certificate_path), days_ago=round(-left / _DAY, 1))
    elif left < 14 * _DAY:
        log.warning("the certificate expires soon", path=str(certificate_path), days=round(left / _DAY, 1))
