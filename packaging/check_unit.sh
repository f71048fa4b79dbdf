#!/usr/bin/env bash
# Boots the tree that check_dockerfile.py left, with systemd in it, and tries omnikv.service there: it
# answers, keeps a context over a restart, comes back after a kill, stays down after a mistake in its
# flags, and takes keys by the drop-in of docs/serve.md. As root; needs systemd-nspawn (the package
# systemd-container) and the network for the tree's packages.
#
#     packaging/check_unit.sh [WORK]      WORK is check_dockerfile.py's --work
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(realpath "${1:-$root/build/dockerfile}")
tree=$work/booted
if [ "${OMNIKV_UNSHARED:-}" != 1 ]; then
  OMNIKV_UNSHARED=1 exec unshare --mount "$0" "$@"  # mounts go when it ends
fi
rm -rf --one-file-system "$tree"
cp -a "$work/stage1" "$tree"
cp /etc/resolv.conf "$tree/etc/resolv.conf"
cp "$root/packaging/omnikv.service" "$tree/usr/lib/systemd/system/"
mount -t proc proc "$tree/proc"
chroot "$tree" sh -c 'userdel omnikv; rm -rf /var/lib/omnikv; apt-get update -qq &&
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    systemd systemd-sysv dbus libnss-systemd' >"$work/booted.log" 2>&1
chroot "$tree" systemd-analyze verify omnikv.service
umount "$tree/proc"

cat >"$tree/etc/systemd/system/probe.service" <<'UNIT'
[Service]
Type=oneshot
ExecStart=/bin/bash -x /probe.sh
ExecStopPost=systemctl poweroff
StandardOutput=file:/probe.log
StandardError=file:/probe.err
[Install]
WantedBy=multi-user.target
UNIT
# The drop-in as the document shows it, without https.
mkdir -p "$tree/etc/omnikv"
sed -n '/^```ini/,/^```/p' "$root/docs/serve.md" | grep -v '^```' | grep -v '^LoadCredential=\(cert\|key\):' |
  sed 's/ --ssl-[a-z-]* [^ ]*//g' >"$tree/etc/omnikv/drop-in"
cat >"$tree/probe.sh" <<'PROBE'
set -eu
ask() {
  for _ in $(seq 120); do
    curl -fs -o /dev/null http://127.0.0.1:8080/health && break
    sleep 0.5
  done
  curl -fsS "$@" http://127.0.0.1:8080/v1/chat/completions -d "{\"temperature\": 0, \"max_tokens\": 16,
    \"messages\": [{\"role\": \"user\", \"content\": \"$(printf 'The grass is green and the sky is blue. %.0s' {1..60})The pass key is 48213. What is the pass key?\"}]}" >/answer
  grep -q 'The pass key is 48213' /answer
}
systemctl start omnikv
ask
systemctl restart omnikv
ask
grep -q '"stored_tokens":[1-9]' /answer  # from the store
echo answers, and keeps contexts
systemctl kill --signal=KILL omnikv
sleep 1
ask
[ "$(systemctl show --property=NRestarts --value omnikv)" = 1 ]
echo comes back after a kill
echo 'OMNIKV_FLAGS=--no-such-flag' >/etc/default/omnikv
systemctl restart omnikv || true
sleep 8
[ "$(systemctl is-active omnikv)" = failed ]
echo stays down after a mistake
echo 'OMNIKV_FLAGS=--ctx 4k' >/etc/default/omnikv
mkdir /etc/systemd/system/omnikv.service.d
cp /etc/omnikv/drop-in /etc/systemd/system/omnikv.service.d/override.conf
echo sk-of-the-test >/etc/omnikv/keys
chmod 600 /etc/omnikv/keys
systemctl daemon-reload
systemctl restart omnikv
ask -H 'Authorization: Bearer sk-of-the-test'
[ "$(curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8080/v1/models)" = 401 ]
systemctl stop omnikv
[ "$(systemctl show --property=Result --value omnikv)" = success ]
echo takes keys, and stops well
PROBE
systemctl --root="$tree" enable --quiet probe
timeout 300 systemd-nspawn --quiet --register=no --keep-unit --private-network --directory "$tree" --boot \
  >"$work/booted.out" 2>&1 || true
cat "$tree/probe.log"
grep -q '^takes keys, and stops well$' "$tree/probe.log" || {
  tail -5 "$tree/probe.err" >&2
  echo "check_unit.sh: the probe did not reach its end: $tree/probe.err, $work/booted.out" >&2
  exit 1
}
