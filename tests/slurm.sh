#!/usr/bin/env bash
# A real Slurm of one node, this machine, for a test (as root; Debian's slurm-wlm and munge).
# Usage: slurm.sh start|stop DIRECTORY; DIRECTORY/slurm.conf is then what SLURM_CONF must name.
set -euo pipefail
directory=$2

if [ "$1" = stop ]; then
    for name in slurmd slurmctld munged; do
        [ ! -e "$directory/$name.pid" ] || kill "$(cat "$directory/$name.pid")" || true
    done
    exit
fi

mkdir -p "$directory/state" "$directory/spool"
host=$(hostname -s)
cores=$(nproc)
# Ports and a key of its own: it disturbs no other Slurm of this machine.
read -r control node < <(python3 -c '
import socket
some = [socket.socket() for _ in range(2)]
for s in some: s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in some))')
cat > "$directory/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control
SlurmdPort=$node
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$directory/munge.socket
CredType=cred/munge
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/spool
SlurmctldPidFile=$directory/slurmctld.pid
SlurmdPidFile=$directory/slurmd.pid
SlurmctldLogFile=$directory/slurmctld.log
SlurmdLogFile=$directory/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=60
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
END
chmod 700 "$directory"
head -c 1024 /dev/urandom > "$directory/munge.key"
chmod 400 "$directory/munge.key"
munged --key-file="$directory/munge.key" --socket="$directory/munge.socket" \
    --pid-file="$directory/munged.pid" --log-file="$directory/munged.log" \
    --seed-file="$directory/munge.seed" --force
slurmctld -f "$directory/slurm.conf"
slurmd -f "$directory/slurm.conf"
export SLURM_CONF=$directory/slurm.conf
for _ in $(seq 60); do
    ! sinfo --noheader --format=%T 2>/dev/null | grep -q idle || exit 0
    sleep 0.5
done
tail -n 20 "$directory"/*.log >&2
exit 1
