"""How a rank's run ends: recorded in its status, and explained if other ranks are the cause."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import MegarlError, PeerError, StopError
from megarl.megatron.distributed import is_collective_error
from megarl.run.signs import describe_ranks, read_signs
from megarl.run.vitals import Vitals

_SIGNS_ARE_OLD_S = 6.0
"""After this time the signs of a rank that has died are old enough to show it."""


@contextmanager
def record_ending(vitals: Vitals, folder: Path, rank: int, ranks: int) -> Iterator[None]:
    """Record in ``vitals`` how the block ends. A failed collective call becomes a PeerError."""
    try:
        yield
    except StopError:
        vitals.end("stopped")
        raise
    except MegarlError as error:
        vitals.end("failed", error)
        raise
    except Exception as error:
        if ranks == 1 or not is_collective_error(error):
            vitals.end("failed", error)
            raise
        status, traced = vitals.status, "".join(traceback.format_exception(error))
        (folder / "ranks" / f"{rank:05d}.error.txt").write_text(traced)
        time.sleep(_SIGNS_ARE_OLD_S)
        where = describe_ranks([sign for sign in read_signs(folder, ranks) if sign["rank"] != rank], time.time())
        lost = PeerError(
            f"rank {rank} lost the others in phase {status.phase} after step {status.step}: "
            f"{str(error).splitlines()[0][:200]}; {where}; the run continues from its newest checkpoint when it is "
            "started again"
        )
        vitals.end("failed", lost)
        raise lost from error
    except BaseException as error:  # KeyboardInterrupt or SystemExit
        vitals.end("failed", error)
        raise
    else:
        vitals.end("finished")
