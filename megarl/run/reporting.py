"""How a run ends, for its status file and for whoever reads the error."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import MegarlError, PeerError, StopError
from megarl.megatron.distributed import is_collective_error
from megarl.run.vitals import Vitals, read_signs, whereabouts

_SIGNS_ARE_OLD_S = 6.0
"""After so long a rank that has died is seen to be silent."""


@contextmanager
def reported(vitals: Vitals, folder: Path, rank: int, ranks: int) -> Iterator[None]:
    """Tell ``vitals`` how the block ends. PeerError in place of torch's if a collective call fails."""
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
        where = whereabouts([sign for sign in read_signs(folder, ranks) if sign["rank"] != rank], time.time())
        lost = PeerError(
            f"rank {rank} lost the others in phase {status.phase} after step {status.step}: "
            f"{str(error).splitlines()[0][:200]}; {where}; the run continues from its newest checkpoint when it is "
            "started again"
        )
        vitals.end("failed", lost)
        raise lost from error
    except BaseException as error:  # a keyboard, or an exit
        vitals.end("failed", error)
        raise
    else:
        vitals.end("finished")
