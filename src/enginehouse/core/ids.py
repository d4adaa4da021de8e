"""The types of ids: of nodes, operations and intents.

All are text (a UUID), as rows and JSON hold them; the type checker refuses one kind in the place of another.
An id becomes one of these where it enters: in a row, in a decoded message, in the path of a route, or where it is made.
What people type (a name, or the start of an id) is plain text.
"""

from __future__ import annotations

from typing import NewType

NodeId = NewType("NodeId", str)
OperationId = NewType("OperationId", str)
IntentId = NewType("IntentId", str)
