"""A client for the public API in Python: ``Client`` for threads, ``AsyncClient`` for asyncio.

from edged.client import Client

with Client() as client:
    for event in client.generate("The sea is", max_tokens=20):
        print(getattr(event, "text", ""), end="")
"""

from edged.client.address import default_address
from edged.client.asynchronous import AsyncClient, AsyncGeneration
from edged.client.blocking import Client
from edged.client.credentials import Credentials
from edged.client.events import Answer, Chunk, Event, Finished, Started, ToolCall, Usage
from edged.client.generation import Generation

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncGeneration",
    "Chunk",
    "Client",
    "Credentials",
    "Event",
    "Finished",
    "Generation",
    "Started",
    "ToolCall",
    "Usage",
    "default_address",
]
