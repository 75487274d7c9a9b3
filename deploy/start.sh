#!/usr/bin/env bash
# Starts Ray on this Mac, in place of any Ray that runs here:
#   start.sh head   OWN_ADDRESS
#   start.sh worker HEAD_ADDRESS
# Must run over SSH or in Terminal: what a LaunchAgent starts may not reach the local network (macOS 15 and later).
source ~/.cidery/env.sh
role=$1
address=$2

# `hostname` changes with the network; the LocalHostName stays, and is unique on it.
mac=$(scutil --get LocalHostName 2>/dev/null || hostname -s)

case $role in
  head)
    # A Mac that sleeps or hangs is noticed after about 6 s instead of 62. It is the head that checks.
    export RAY_health_check_initial_delay_ms=2000
    export RAY_health_check_period_ms=1000
    export RAY_health_check_timeout_ms=2000
    export RAY_health_check_failure_threshold=3
    # The head is a Mac of the fleet too. `head` is where the router runs.
    resources="{\"head\": 1, \"mac\": 1, \"mac:$mac\": 1}"
    # The bootstrap file names the workers: the head starts them over SSH, and again when they return.
    options=(--head --port=6379 --node-ip-address="$address" --include-dashboard=false
      --ray-client-server-port=10001 --autoscaling-config="$HOME/ray_bootstrap_config.yaml")
    ;;
  worker)
    resources="{\"mac\": 1, \"mac:$mac\": 1}"
    options=(--address="$address:6379")
    ;;
  *)
    echo "start.sh: head or worker, got '$role'" >&2
    exit 2
    ;;
esac

# Fixed, so that a firewall can be told. Ray takes others at random.
options+=(--node-manager-port=6381 --object-manager-port=6382 --runtime-env-agent-port=6383
  --dashboard-agent-grpc-port=6384 --dashboard-agent-listen-port=6385 --metrics-export-port=6386
  --min-worker-port=20000 --max-worker-port=20199)

# No KV cache travels through Ray's object store; 75 MiB is its minimum.
options+=(--object-store-memory=100000000 --num-gpus=0)

# macOS starts shells with 256 open files; where a limit forbids more, Ray says so itself.
ulimit -n 10240 2>/dev/null

# Ray gives a node 15 s to come up, whatever is set; a loaded Mac may need a second try.
for _ in 1 2 3; do
  # Ends every Ray process on this Mac, of whichever cluster.
  ray stop -f
  if ray start "${options[@]}" --resources="$resources"; then
    if command -v caffeinate >/dev/null; then
      # Awake while Ray runs. Against a closed lid, or on battery, it can do nothing.
      nohup caffeinate -is -w "$(pgrep -n -x raylet)" >/dev/null 2>&1 </dev/null &
    fi
    exit 0
  fi
  sleep 2
done
exit 1
