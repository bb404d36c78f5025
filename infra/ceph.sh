#!/bin/sh
# A throw-away Ceph object gateway on loopback, for tests: one monitor, one OSD that holds its data in memory, one
# RADOS Gateway. Needs Debian's ceph-common, ceph-mon, ceph-osd and radosgw (make test-ceph); no systemd, no root.
#
#   infra/ceph.sh start FOLDER [ACCESS_KEY SECRET_KEY]
#       makes FOLDER, starts the daemons, prints endpoint and credentials, random if not given, as shell exports
#   infra/ceph.sh stop FOLDER
#       ends them and removes FOLDER
#
# Configuration, logs and process ids lie in FOLDER alone: a Ceph of this machine's own is neither read nor touched.
set -eu
unset CEPH_ARGS CEPH_CONF CEPH_KEYRING 2>/dev/null || true

die() { echo "$0: $*" >&2; exit 1; }

random() { od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

start() {
    for program in ceph ceph-mon ceph-osd radosgw radosgw-admin monmaptool; do
        command -v $program >/dev/null || die "$program is not installed: make test-ceph"
    done
    [ ! -e "$1" ] || die "$1 is there already; give a folder to be made"
    mkdir -p "$1"
    folder=$(cd "$1" && pwd)
    trap 'tail -n 5 "$folder"/*.log >&2 || true; stop "$folder"; die "did not start"' EXIT
    trap 'exit 1' INT TERM  # dash runs no EXIT trap when a signal ends it
    fsid=$(cat /proc/sys/kernel/random/uuid)
    mon=$(free_port)
    gateway=$(free_port)
    mkdir "$folder/mon" "$folder/osd" "$folder/rgw"
    cat >"$folder/ceph.conf" <<END
[global]
fsid = $fsid
mon host = v2:127.0.0.1:$mon/0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon cluster mode = crc
ms mon service mode = crc
ms mon client mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
mon allow pool size one = true
osd crush chooseleaf type = 0
pid file = $folder/\$name.pid
log file = $folder/\$name.log
run dir = $folder
admin socket =
keyring = $folder/keyring
[mon]
mon data = $folder/mon
mon cluster log file = $folder/cluster.log
mon data avail warn = 1
mon data avail crit = 1
[osd]
osd data = $folder/osd
osd objectstore = memstore
osd crush initial weight = 1
memstore device bytes = 4294967296
[client]
rgw data = $folder/rgw
rgw frontends = beast endpoint=127.0.0.1:$gateway
rgw thread pool size = 64
END
    conf="--conf $folder/ceph.conf"
    touch "$folder/keyring"
    monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon]" "$folder/monmap" >/dev/null
    ceph-mon $conf -i a --mkfs --monmap "$folder/monmap" >&2
    ceph-mon $conf -i a >&2
    ceph-osd $conf -i "$(ceph $conf --connect-timeout 60 osd create)" --mkfs >&2
    ceph-osd $conf -i 0 >&2
    radosgw $conf -n client.rgw >&2
    access=${2:-test$(random 8)}
    secret=${3:-$(random 20)}
    radosgw-admin $conf user create --uid test --display-name test --access-key "$access" --secret-key "$secret" \
        >/dev/null 2>"$folder/user.log"
    tries=0
    until python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$gateway', timeout=5)" 2>/dev/null
    do
        tries=$((tries + 1))
        [ $tries -lt 120 ] || exit 1
        sleep 0.5
    done
    trap - EXIT INT TERM
    echo "export AWS_ENDPOINT_URL=http://127.0.0.1:$gateway"
    echo "export AWS_ACCESS_KEY_ID=$access"
    echo "export AWS_SECRET_ACCESS_KEY=$secret"
    echo "export AWS_DEFAULT_REGION=us-east-1"
}

stop() {
    [ -f "$1/ceph.conf" ] || die "$1 holds no gateway"
    folder=$(cd "$1" && pwd)
    for name in client.rgw osd.0 mon.a; do
        [ -s "$folder/$name.pid" ] || continue
        pid=$(cat "$folder/$name.pid")
        # the number may be another process's by now
        grep -qs "$folder/ceph.conf" "/proc/$pid/cmdline" || continue
        kill "$pid"
        for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
    rm -rf "$folder"
}

case "${1:-}:${2:-}" in
    start:?*) start "$2" "${3:-}" "${4:-}" ;;
    stop:?*) stop "$2" ;;
    *) die "usage: $0 start FOLDER [ACCESS_KEY SECRET_KEY] | stop FOLDER" ;;
esac
