"""Everything that rota uses from the inside of flwr, which may change in any version.

tests/test_flower.py names the versions that this file holds for, and fails for any other.
`Session` is the server's side of a run, in place of Flower's ServerApp process. `Member` is a
node's side, in place of a SuperNode.

No HttpGrid is used: it ends its own process on a 401, and waits for up to 180 seconds for a reply
whose upload has stopped.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import fab_to_proto, message_from_proto, message_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from rota.files import write
from rota.flower import keys
from rota.flower.letter import LARGEST, Letter, LinkLost, Refused
from rota.flower.records import to_records

VERSIONS = ("1.40", "1.41", "1.42")
"""The versions of flwr that this file was written for."""
BEAT = 15.0
"""Seconds between two signs of life of the server's run."""
AWAY = (502, 503, 504)
"""Statuses of a SuperLink that is restarting."""
PARTING = 3.0
"""How many seconds saying goodbye may take."""
ROOM = 8
"""How many replies are in memory at once."""


def parting(words: Callable[[], None]) -> None:
    """Say something last, without waiting for long: nobody may hear it."""

    def say() -> None:
        with suppress(Exception):
            words()

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(PARTING)


def named(message: Message, number: str) -> Message:
    """A message that knows its own id."""
    message.metadata.__dict__["_message_id"] = number
    return message


class Session:
    """A run on a SuperLink: this process is its ServerApp."""

    def __init__(
        self,
        address: str,
        root: bytes | None,
        secret: bytes | None,
        patience: float,
        app: dict[str, bytes],
    ) -> None:
        self.address, self.root, self.secret, self.patience = address, root, secret, patience
        self.ended, self.cut = threading.Event(), False
        """Whether the SuperLink was away since this was last set."""
        version, plain = RuntimeVersionHttpInterceptor, root is None
        self.control = ControlHttpClient.from_server_address(
            address, plain, root, interceptors=[version(component_name="cli")]
        )
        fab, _ = build_fab_from_files(app)
        sent = fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))
        self.run = self.call(self.control.StartRun, StartRunRequest(fab=sent)).run_id
        interceptors: list[Any] = [version(component_name="SuperExec")]
        if secret:
            paths = frozenset({"/flwr.proto.Runtime/AcquireTask"})
            interceptors.append(
                SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=paths)
            )
        executor = RuntimeHttpClient.from_server_address(
            address, plain, root, interceptors=interceptors
        )
        wanted = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
        task = self.call(executor.AcquireTask, wanted)
        executor.close()
        if not task.token or task.task.run_id != self.run:
            raise Refused(
                f"the SuperLink at {address} gave us another run than ours: stop the other server "
                "that uses it, or choose another port"
            )
        self.client = RuntimeHttpClient.from_server_address(
            address,
            plain,
            root,
            interceptors=[
                version(component_name="flwr-serverapp"),
                RuntimeTokenHttpInterceptor(token=task.token),
            ],
        )
        self.node = Node(node_id=SUPERLINK_NODE_ID)
        ours = self.call(self.client.PullTaskInput, PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = ours.task_id, ours.run.run_id
        TaskIdentity.node_id = ours.context.node_id
        self.pool, self.room = ThreadPoolExecutor(4, "replies"), threading.Semaphore(ROOM)
        self.coming: dict[str, Future[Message]] = {}
        self.most: dict[str, int] = {}
        """How many bytes the reply to a message may have."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Call the SuperLink, again and again while it cannot be reached."""
        end, wait = time.monotonic() + self.patience, 0.1
        while True:
            try:
                return method(request)
            except httpx.TransportError as error:
                self.cut = self.cut or isinstance(error, httpx.ConnectError)
                if time.monotonic() > end or self.ended.is_set():
                    raise
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status in (401, 403):
                    raise LinkLost(error.response.text) from error
                if status not in AWAY or time.monotonic() > end:
                    raise
            time.sleep(wait * random.uniform(0.8, 1.2))
            wait = min(2 * wait, 2.0)

    def _beat(self) -> None:
        while not self.ended.wait(BEAT):
            with suppress(httpx.HTTPError):
                self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def nodes(self) -> list[int]:
        """The nodes that are online."""
        return [n.node_id for n in self.call(self.client.GetNodes, GetNodesRequest()).nodes]

    def register(self, public: bytes) -> None:
        """Let the node with this public key in."""
        try:
            self.call(self.control.RegisterNode, RegisterNodeRequest(public_key=public))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 409 and "already" not in error.response.text.lower():
                raise

    def send(self, letters: list[tuple[int, Letter]], seconds: float) -> list[str]:
        """Send letters in one request."""
        messages, trees, objects = [], [], dict[str, Any]()
        made = [
            Message(to_records(letter), dst_node_id=node, message_type=letter.kind, ttl=seconds)
            for node, letter in letters
        ]
        with no_object_id_recompute():
            for message in made:
                named(message, message.object_id)
                messages.append(message_to_proto(remove_content_from_message(message)))
                trees.append(get_object_tree(message))
                objects |= get_all_nested_objects(message)
            request = PushAppMessagesRequest(messages_list=messages, message_object_trees=trees)
            reply = self.call(self.client.PushMessages, request)
            push_objects(
                objects,
                make_push_object_fn_protobuf(
                    lambda each: self.call(self.client.PushObject, each),
                    self.node,
                    self.run,
                    reply.session_id,
                ),
                object_ids_to_push=set(reply.objects_to_push),
            )
        numbers = list(reply.message_ids)
        self.most |= {key: each.most for key, (_, each) in zip(numbers, letters, strict=True)}
        return numbers

    def replies(self, keys: list[str], limit: float = 60.0) -> Iterator[tuple[str, Message | str]]:
        """Replies that have come. One on its way is fetched by a thread, and comes later."""
        asked = [key for key in keys if key not in self.coming]
        if asked:
            found = self.call(self.client.PullMessages, PullAppMessagesRequest(message_ids=asked))
            for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                key = proto.metadata.reply_to_message_id
                most = self.most.pop(key, LARGEST)
                self.coming[key] = self.pool.submit(self._fetch, proto, tree, most, limit)
        for key in [key for key, future in self.coming.items() if future.done()]:
            future = self.coming.pop(key)
            self.room.release()
            try:
                yield key, future.result()
            except LinkLost:
                raise
            except Refused as why:
                yield key, str(why)
            except Exception as error:
                yield key, f"its reply did not arrive whole ({type(error).__name__})"

    def _fetch(self, proto: Any, tree: Any, most: int, limit: float) -> Message:
        while not self.room.acquire(timeout=0.2):  # what has come waits to be added up
            if self.ended.is_set():
                raise LinkLost("the run has ended")
        number, came = proto.metadata.message_id, list[int]()

        def pull(request: Any) -> Any:
            found = self.call(self.client.PullObject, request)
            came.append(len(found.object_content))
            if sum(came) > most:
                raise Refused(f"its reply has more than {most:,} bytes")
            return found

        try:
            contents = pull_objects(
                [each.object_id for each in iterate_object_tree(tree)],
                make_pull_object_fn_protobuf(pull, self.node, self.run),
                initial_backoff=0.02,
                backoff_cap=0.25,
                max_time=limit,
            )
        finally:  # the SuperLink may forget it
            confirm = ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run, message_object_id=number
            )
            self.call(self.client.ConfirmMessageReceived, confirm)
        return named(inflate_object_from_contents(number, contents), number)

    def close(self) -> None:
        """Tell the SuperLink that the run is over."""
        self.ended.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        done = PushTaskOutputRequest(sub_status="completed", details="")
        parting(lambda: self.client.PushTaskOutput(done))
        parting(lambda: self.control.StopRun(StopRunRequest(run_id=self.run)))
        for client in (self.client, self.control):
            with suppress(Exception):
                client.close()


class Member:
    """A node of a SuperLink. It keeps its key, and the number that the SuperLink gave it."""

    def __init__(
        self, address: str, folder: Path, root: bytes | None, key: bytes | None, beat: float
    ) -> None:
        self.folder, self.beat, self.known = folder, beat, key is not None
        own = folder / "key"
        private = keys.node_key(own) if key is None else keys.read_secret(key, "--key")
        self.public = keys.public_bytes(private.public_key())
        self.client = FleetHttpClient.from_server_address(
            address,
            root is None,
            root,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
        )
        self.node: Any = None
        self.off = datetime.timedelta(0)
        """How far the server's clock is ahead of ours."""

    def join(self) -> int:
        """Be online: as the node that we were before, if there was one."""
        if not self.known:
            try:
                self.client.RegisterNode(RegisterNodeFleetRequest(public_key=self.public))
            except httpx.HTTPStatusError as error:
                if error.response.status_code in AWAY:
                    raise
        last = self.folder / "node"
        # after a kill the SuperLink believes that we are online: say that we left
        if last.exists():
            with suppress(httpx.HTTPStatusError, ValueError):
                number = int(last.read_text())
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=number))
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=self.beat)
        number = self.client.ActivateNode(request).node_id
        self.node = Node(node_id=number)
        with suppress(OSError):  # a full disk must not keep us from working
            write(last, str(number))
        return int(number)

    def heed(self, refusal: httpx.Response) -> bool:
        """Take the server's time if ours is wrong; a SuperLink refuses nodes whose clock is off."""
        told = refusal.headers.get("date")
        if refusal.status_code != 401 or not told:
            return False
        off = parsedate_to_datetime(told) - datetime.datetime.now(datetime.UTC)
        wrong = abs((off - self.off).total_seconds()) > 5
        if wrong:
            set_clock(off)
            self.off = off
        return wrong

    def leave(self) -> None:
        """Be offline."""
        if self.node is not None:
            request = DeactivateNodeRequest(node_id=self.node.node_id)
            parting(lambda: self.client.DeactivateNode(request))

    def live(self) -> None:
        """Give a sign of life."""
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=self.beat)
        self.client.SendNodeHeartbeat(request)

    def pull(self) -> Message | None:
        """The next message for this node, if there is one."""
        reply = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not reply.messages_list:
            return None
        proto, tree = reply.messages_list[0], reply.message_object_trees[0]
        run, number = proto.metadata.run_id, proto.metadata.message_id
        contents = pull_objects(
            [each.object_id for each in iterate_object_tree(tree)],
            make_pull_object_fn_protobuf(self.client.PullObject, self.node, run),
            initial_backoff=0.02,
            backoff_cap=0.5,
            max_time=120,
        )
        make_confirm_message_received_fn_protobuf(
            self.client.ConfirmMessageReceived, self.node, run
        )(number)
        return named(inflate_object_from_contents(number, contents), number)

    def push(self, reply: Message, seconds: float) -> None:
        """Send a reply."""
        named(reply, reply.object_id)
        with no_object_id_recompute():
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            answer = self.client.PushMessages(request)
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(
                    self.client.PushObject, self.node, reply.metadata.run_id, answer.session_id
                ),
                object_ids_to_push=set(answer.objects_to_push),
            )


def set_clock(off: datetime.timedelta) -> None:
    """Sign and date this process's requests by a clock that is this far ahead of the machine's."""

    def now() -> datetime.datetime:
        return datetime.datetime.now(tz=datetime.UTC) + off

    for name in ("flwr.app.message.message", "flwr.supernode.node_auth_http_interceptor"):
        importlib.import_module(name).now = now  # type: ignore[attr-defined]


def remember(message: Message) -> bytes:
    """What is needed to reply to a message after a restart."""
    kept: bytes = message_to_proto(remove_content_from_message(message)).SerializeToString()
    return kept


def recall(kept: bytes) -> Message:
    """A message without its content, to which an error can be replied."""
    return message_from_proto(ProtoMessage.FromString(kept))
