"""How commands reach the gateway."""

import signal

import click
import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"


def checked_utf8(text: str, name: str) -> str:
    """What the wire can carry: raises a one-line error for bytes of the command line that were no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.ClickException(f"{name} is not valid UTF-8 (character {error.start + 1})") from error
    return text


class channel:  # noqa: N801 - reads as a function
    """An open channel; a call that fails ends the command with the gateway's own words."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address)

    def __enter__(self) -> grpc.Channel:
        # Ctrl-C must end a running call, not wait for it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._channel

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._channel.close()
        if isinstance(error, grpc.RpcError):
            hint = f" (is `cidery serve` running at {self._address}?)"
            code = error.code()
            raise click.ClickException(f"{error.details()}{hint if code is grpc.StatusCode.UNAVAILABLE else ''}")
