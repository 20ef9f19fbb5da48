"""A process that answers as an SGLang server does, starts in a moment, and tells what has happened to it.

Run as ``python sglang_stand_in.py PORT FOLDER [KEY]``. Its weights are one number, the second element of every tensor
that it is sent (``weights_of``). FOLDER/control.json says how it misbehaves; FOLDER/events.jsonl is what it was asked.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import re
import struct
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.engines.sglang.plugin.deltas import FORMAT, Bases
from megarl.errors import WeightSyncError

MAGIC = 12345.0
MARK = struct.pack("<f", MAGIC)
SHARED = re.compile(rb"/(torch_\d+_\d+_\d+)")
"""The name of shared memory in a handle."""


class Reader(pickle.Unpickler):
    """Reads a pickle of torch's without torch: calls become their arguments."""

    def find_class(self, module: str, name: str) -> Any:
        return SimpleNamespace if name == "SimpleNamespace" else lambda *given: given


class StandIn:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = "default"
        self.weights: set[float] = {0.0}
        """The numbers that its tensors hold: several in the middle of an update."""
        self.fresh_update = True
        self.bases = Bases()
        """Of megarl's plugin."""
        self.groups: dict[str, Any] = {}
        self.scheduler = threading.Lock()
        """Joins groups and takes broadcasts one after the other, as a server's scheduler does."""
        self.running = threading.Event()
        self.running.set()
        self.tell("started")

    def control(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "control.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def tell(self, event: str, **more: Any) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **more}) + "\n")

    def take(self, raw: bytes) -> None:
        found, place = set[float](), raw.find(MARK)
        while place >= 0:
            found.add(struct.unpack_from("<f", raw, place + 4)[0])
            place = raw.find(MARK, place + 8)
        self.weights = found if self.fresh_update else self.weights | found
        self.fresh_update = False

    def receive(self, payload: bytes) -> None:
        """Takes a bucket, or reads it where its handle says; tells how many bytes, and when it has them."""
        content = Reader(io.BytesIO(payload)).load()
        size = max(place.end_idx for place in content["metadata"])
        if found := SHARED.search(payload):
            with (Path("/dev/shm") / found[1].decode()).open("rb") as file:
                payload = file.read(size)
        if not self.control().get("deaf"):
            self.take(payload)
        self.tell("received", bytes=size, shared=found is not None)

    def expand(self, payloads: list[str]) -> tuple[int, Any]:
        """Answers as megarl's plugin does, or by ``control()["deltas"]`` without it or with a fault."""
        fault = self.control().get("deltas")
        if fault == "no plugin":
            return 400, {"success": False, "message": "Unknown load_format"}
        if not payloads:
            return 200, {"success": True, "message": FORMAT}
        if fault:
            (self.folder / "control.json").unlink()  # once
        if fault == "lost bucket":
            return 200, {"success": True, "message": "Success"}
        if fault == "forgets":
            self.bases = Bases()
        elif fault == "other byte":
            for held, _ in self.bases._held.values():
                held[9] ^= 1  # neither of the two numbers
        try:
            _, flat, receipt = self.bases.expand(base64.b64decode(payloads[0]))
        except WeightSyncError as error:
            return 400, {"success": False, "message": str(error)}
        self.take(flat.tobytes())
        self.tell("received", bytes=len(payloads[0]), shared=False)
        return 200, {"success": True, "message": receipt}

    def join(self, body: dict[str, Any]) -> None:
        """Joins a group of a source of weights, in SGLang's way."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper

        place = body["master_address"], body["master_port"], body["world_size"]
        connected = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=300))
        self.tell("joining")
        store = PrefixStore(body["group_name"], connected)
        size, rank, name = body["world_size"], body["rank_offset"], body["group_name"]
        patience = {"timeout": timedelta(seconds=300), "backend_options": None, "group_name": name}
        self.groups[name], _ = _new_process_group_helper(size, rank, [], Backend("gloo"), store, **patience)

    def take_broadcast(self, body: dict[str, Any]) -> None:
        """Receives a bucket from its source."""
        import torch
        from torch.distributed import BroadcastOptions

        places = zip(body["dtypes"], body["shapes"], strict=True)
        sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in places]
        flat, options = torch.empty(sum(sizes), dtype=torch.uint8), BroadcastOptions()
        options.rootRank = 0
        self.groups[body["group_name"]].broadcast([flat], options).wait()
        self.take(flat.numpy().tobytes())
        self.tell("received", bytes=sum(sizes), shared=False)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        control = self.control()
        self.tell(path, version=self.version, weights=sorted(self.weights), mine="mine" in body)
        if control.get("die_at") == path:
            (self.folder / "control.json").unlink()
            os._exit(9)
        time.sleep(control.get(path, 0.0))
        while self.control().get("hold") == path:
            time.sleep(0.002)
        if path == control.get("refuse"):
            return 400, {"success": False}
        if path in control.get("odd", ()):
            return 200, ["odd"]
        if path == "server_info":
            more = control.get("info", {})
            return 200, {"version": "0.5.23", "tp_size": 1, "api_key": "any", **more}
        if path == "model_info":
            return 200, {"weight_version": self.version}
        if path == "pause_generation":
            self.running.clear()
            self.fresh_update = True
        elif path == "continue_generation":
            self.running.set()
        elif path == "update_weight_version":
            self.version = body["new_version"]
        elif path == "update_weights_from_tensor" and body.get("load_format") == FORMAT:
            return self.expand(body["serialized_named_tensors"])
        elif path == "update_weights_from_tensor":
            self.receive(base64.b64decode(body["serialized_named_tensors"][0]))
        elif path in ("init_weights_update_group", "update_weights_from_distributed"):
            with self.scheduler:
                (self.join if path.startswith("init") else self.take_broadcast)(body)
        elif path == "update_weights_from_disk":
            for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                self.take(file.read_bytes())
        elif path == "weights_checker":
            return 200, {"ranks": [{"checksums": {"w": str(sorted(self.weights))}}]}
        elif path in ("generate", "health"):
            self.running.wait()
            return 200, {"is": [self.version, sorted(self.weights)]}
        return 200, {"success": True}


def serve(port: int, folder: Path, key: str | None) -> None:
    stand_in = StandIn(folder)
    if stand_in.control().get("die_at") == "start":
        sys.exit(3)
    time.sleep(stand_in.control().get("start", 0.0))
    stand_in.tell("serving")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = 401, {"message": "no key"}
            if key is None or self.headers.get("authorization") == f"Bearer {key}" or self.path == "/health":
                status, content = stand_in.answer(self.path.strip("/"), json.loads(body or b"{}"))
            found = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
