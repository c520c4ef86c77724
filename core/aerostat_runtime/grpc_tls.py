"""gRPC between the parts by a `TlsFolder`: credentials of both sides, and the server's check of who calls."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc

from aerostat_runtime.tls import Material, TlsFolder

_ALTERNATIVE_NAMES: Final = "x509_subject_alternative_name"
_Context = grpc.aio.ServicerContext[Any, Any]


def server_credentials(folder: TlsFolder) -> grpc.ServerCredentials:
    """For a server's whole life: each handshake is done with what the folder holds then. Clients must have a certificate."""
    given = folder.material

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, from threads of its own, before each handshake; None: nothing has changed."""
        nonlocal given
        if (current := folder.material) is given:
            return None
        given = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        renewed,  # type: ignore[arg-type]  # None is documented, and not in the types
        require_client_authentication=True,
    )


def peer_channel(address: str, material: Material, peer: str, options: tuple[tuple[str, Any], ...] = ()) -> grpc.aio.Channel:
    """To whoever proves to be that peer. It keeps this material, also when it connects again: only another channel has newer one."""
    credentials = grpc.ssl_channel_credentials(material.authorities, material.key, material.chain)
    return grpc.aio.secure_channel(address, credentials, options=(*options, ("grpc.ssl_target_name_override", peer)))


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.authorities)


class OnlyFrom(grpc.aio.ServerInterceptor):
    """Calls of other peers than this one are refused, whatever CA vouches for them."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The method's handler behind the check. (Its types, in what is published of gRPC's, are those of the API that is not async.)"""
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        formats = {"request_deserializer": handler.request_deserializer, "response_serializer": handler.response_serializer}
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._streamed(handler.unary_stream), **formats)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._single(handler.unary_unary), **formats)
        raise TypeError("a method that takes a stream has no check of its peer")

    def _single(self, method: Callable[[Any, _Context], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def checked(request: Any, context: _Context) -> Any:
            await self._check(context)
            return await method(request, context)

        return checked

    def _streamed(self, method: Callable[[Any, _Context], AsyncGenerator[Any, None]]) -> Callable[[Any, Any], Any]:
        async def checked(request: Any, context: _Context) -> AsyncGenerator[Any, None]:
            await self._check(context)
            async with aclosing(method(request, context)) as messages:
                async for message in messages:
                    yield message

        return checked

    async def _check(self, context: _Context) -> None:
        names = [name.decode() for name in context.auth_context().get(_ALTERNATIVE_NAMES, ())]
        if self._peer not in names:
            why = f"this service answers {self._peer} only; the certificate shown is of {', '.join(names) or 'nobody'}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
