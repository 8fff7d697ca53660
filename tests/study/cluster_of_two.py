"""A script for `test_cluster`: a study on a Ray cluster of two nodes, of which one is killed while it works.

Prints one JSON object. A process of its own, as Ray leaves threads and signal handlers behind.
"""

import json
import os
import sys
import threading
import time
import warnings

if __name__ == "__main__":
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
    os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
    os.environ["STUDY_TASK_SECONDS"] = "0.25"  # of each measurement, on the nodes
    warnings.simplefilter("ignore")
    from ray.cluster_utils import Cluster
    from study_task import seeds, tiny_task

    from clipline.study.study import Study

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    os.environ["STUDY_TASK_SECONDS"] = "0"
    study = Study(sys.argv[1], tiny_task(), cluster=cluster.address, side_by_side=1)
    in_flight = []

    def kill():
        while not study.directory.ids():  # both nodes are at work by then
            time.sleep(0.01)
        in_flight.extend(sorted(study.directory.claimed() - set(study.directory.ids())))
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    records = study.results(seeds(6, engine="one-by-one"))  # stacking would import much, on each node
    killer.join()
    study.close()
    cluster.shutdown()
    print(json.dumps({"ids": [record.id for record in records], "in_flight": in_flight}))
