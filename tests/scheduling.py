"""Which process of pytest-xdist runs which file: at most two of them start clusters of Ray."""

from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

MAX_CLUSTERS = 2
"""Clusters that may live at a time. On two cores more of them slow each other's starts to minutes,
so that waits end too early."""

RAY_FOLDERS = {"cluster", "distributed"}
RAY_FILES = {
    "test_cascade_pipeline",
    "test_deployment",
    "test_distill",
    "test_document_stages",
    "test_ray_benchmarks",
    "test_serve_command",
}
"""Files of other folders that start Ray, in this process or in another one."""


def starts_ray(path: Path) -> bool:
    """Whether a file of tests starts Ray."""
    return path.parent.name in RAY_FOLDERS or path.stem in RAY_FILES


class ClusterScheduling(LoadFileScheduling):
    """Each file is run by one process; the first two processes run the files that start Ray."""

    def _scopes_for(self, node: WorkerController) -> list[str]:
        may_start_ray = self.nodes.index(node) < MAX_CLUSTERS
        return [scope for scope in self.workqueue if may_start_ray or not starts_ray(Path(scope))]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if scopes := self._scopes_for(node):
            self.workqueue.move_to_end(scopes[0], last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self.workqueue and not self._scopes_for(node) and not node.shutting_down:
            node.shutdown()
        else:
            super()._reschedule(node)
