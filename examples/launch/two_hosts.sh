#!/usr/bin/env bash
# Simulate two hosts on one machine: two network namespaces that are only connected by a veth pair. The given command
# runs in each of them with NODE_RANK, NNODES=2 and MASTER_ADDR=10.77.0.1, as it would on two machines. Run it in the
# repository, on CPUs:
#   DS_ACCELERATOR=cpu bash examples/launch/two_hosts.sh bash run_gpt2.sh --train-iters 10
# It needs Linux, `ip` and unshared namespaces (root, or a kernel that allows user namespaces). The exit code is that of
# the first host if it is not 0, otherwise that of the second; it is 77 if namespaces cannot be created.
set -uo pipefail

if [ "${1:-}" != --inside ]; then
  [ $# -gt 0 ] || { echo "usage: bash examples/launch/two_hosts.sh COMMAND ..." >&2; exit 2; }
  apart=(unshare --user --map-root-user --net --pid --mount-proc --kill-child --fork)   # kills remaining processes
  "${apart[@]}" true 2> /dev/null && command -v ip nsenter > /dev/null || {
    echo "two_hosts.sh: this machine makes no network namespaces, or has no ip" >&2
    exit 77
  }
  exec "${apart[@]}" bash "$0" --inside "$@"
fi
shift

unshare --net sleep infinity &                  # keeps the second host's namespace alive
second=$!
trap 'kill "$second" 2> /dev/null' EXIT
own=$(readlink /proc/self/ns/net)
for _ in $(seq 100); do
  [ "$(readlink "/proc/$second/ns/net")" = "$own" ] || break
  sleep 0.05
done

on_second() { nsenter --target "$second" --net "$@"; }
set -e
ip link add cable0 type veth peer name cable1
ip link set cable1 netns "$second"
ip address add 10.77.0.1/24 dev cable0
on_second ip address add 10.77.0.2/24 dev cable1
ip link set lo up
ip link set cable0 up
on_second ip link set lo up
on_second ip link set cable1 up
set +e

export NNODES=2 MASTER_ADDR=10.77.0.1
NODE_RANK=0 GLOO_SOCKET_IFNAME=cable0 "$@" &
node0=$!
NODE_RANK=1 GLOO_SOCKET_IFNAME=cable1 on_second "$@" &
node1=$!
wait "$node0"
code0=$?
wait "$node1"
code1=$?
echo "two hosts: node 0 ended with code $code0, node 1 with $code1"
exit $((code0 ? code0 : code1))
