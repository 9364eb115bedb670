"""vLLM's worker with one thing left out that a synchronisation needs; RLX_TEST_FORGETS names it."""

import os
import sys

from rlx.sampler import vllm_process

FORGETS = os.environ["RLX_TEST_FORGETS"]


class Forgetful(vllm_process.VllmWorker):
    def _drop_former_weights(self):
        if FORGETS != "embeddings":
            self._llm.apply_model(vllm_process.repack_matrices)
        if FORGETS != "cache":
            assert self._llm.reset_prefix_cache()


if __name__ == "__main__":
    vllm_process.VllmWorker = Forgetful
    sys.exit(vllm_process.main(int(sys.argv[1]), *sys.argv[2:]))
