#!/bin/sh
# Two "hosts", a and b, of two soft-RoCE NICs each in ONE network namespace: cables a0<->b0 and a1<->b1 (veth), devices
# rxe_a0 rxe_b0 rxe_a1 rxe_b1, addresses 10.77.I.1 (a) and 10.77.I.2 (b). Only for the guest of vm.py.
#
#   links.sh up       make them
#   links.sh mend I   put back what `ip link set aI|bI down` and `tc` took away: link, routes, neighbours, no queue discipline
#
# Not namespaces: rdma_rxe of Linux 6.1 opens its UDP port and looks up routes in the first one only. Instead, policy routing
# sends what goes OUT OF aI to bI's address over the cable (by default it would go over lo), so that cutting a link, netem
# and byte counters act on RDMA traffic as on a real link.
set -e

routes() {
    ip route replace "10.77.$1.2" dev "a$1" src "10.77.$1.1" table $((100 + 2 * $1))
    ip route replace "10.77.$1.1" dev "b$1" src "10.77.$1.2" table $((101 + 2 * $1))
    ip neigh replace "10.77.$1.2" dev "a$1" nud permanent lladdr "$(cat "/sys/class/net/b$1/address")"
    ip neigh replace "10.77.$1.1" dev "b$1" nud permanent lladdr "$(cat "/sys/class/net/a$1/address")"
}

pair() {
    ip link add "a$1" mtu 9000 type veth peer name "b$1" mtu 9000
    ip addr add "10.77.$1.1/32" dev "a$1"
    ip addr add "10.77.$1.2/32" dev "b$1"
    ip link set "a$1" up
    ip link set "b$1" up
    routes "$1"
    ip rule add pref 10 oif "a$1" lookup $((100 + 2 * $1))
    ip rule add pref 10 oif "b$1" lookup $((101 + 2 * $1))
    rdma link add "rxe_a$1" type rxe netdev "a$1"
    rdma link add "rxe_b$1" type rxe netdev "b$1"
}

case $1 in
    up)
        for which in all default; do
            echo 0 >/proc/sys/net/ipv4/conf/$which/rp_filter
            echo 1 >/proc/sys/net/ipv4/conf/$which/accept_local
        done
        # The table "local" after the rules of the NICs (10), not before.
        ip rule add pref 50 lookup local
        ip rule del pref 0 lookup local
        pair 0
        pair 1
        ;;
    mend)
        tc qdisc del dev "a$2" root 2>/dev/null || true
        tc qdisc del dev "b$2" root 2>/dev/null || true
        ip link set "a$2" up
        ip link set "b$2" up
        routes "$2"
        ;;
esac
