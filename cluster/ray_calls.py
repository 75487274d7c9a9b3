"""Calls to Ray actors as plain awaits: our own errors come back as themselves, Ray's as ActorAway."""

from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from cluster.config import NAMESPACE, ROUTER_NAME
from cluster.errors import ActorAway, CideryError


class ActorCaller:
    """A named actor. A call that finds the actor dead or restarting raises ActorAway; the caller may try again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle: Any = None

    async def __call__(self, method: str, *arguments: object, **named: object) -> Any:
        """Awaits one method. Raises whatever CideryError it raised there."""
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            return await getattr(self._handle, method).remote(*arguments, **named)
        except RayTaskError as error:
            if isinstance(error.cause, CideryError):
                raise error.cause from None
            raise
        except (RayActorError, ValueError) as error:
            self._handle = None
            raise ActorAway(f"{self._name} does not answer: {error}") from error


def router() -> ActorCaller:
    """The fleet's router."""
    return ActorCaller(ROUTER_NAME)


def manager_name(mac: str) -> str:
    """Name of a Mac's KVManager actor."""
    return f"kv-manager:{mac}"
