"""Making a reliable connected queue pair and moving it through its states (InfiniBand spec 10.3, table 91).

Knows: attributes. Does not know: what is posted, who the peer is.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

from mooncake.common.errors import TransferError
from transfer_engine.config import EngineConfig
from transfer_engine.protocol import EndpointOffer
from transfer_engine.transports.rdma import verbs
from transfer_engine.transports.rdma.device import Device

RECEIVE_DEPTH = 1
"""Nothing is ever received: one-sided operations need no receive requests. Zero is refused by some providers."""
_RNR_TIMER, _RNR_RETRIES = 12, 7


class QueuePair:
    """Created in INIT. Errors are TransferError. `close` ends all access of this pair to memory."""

    def __init__(self, device: Device, config: EngineConfig, send_depth: int) -> None:
        self._device, self._config = device, config
        self._api = api = device.api
        self.psn = random.getrandbits(24)
        self._alive = False
        capacity = api.QPCap(max_send_wr=send_depth, max_recv_wr=RECEIVE_DEPTH, max_send_sge=1, max_recv_sge=1)
        kind = api.QPInitAttr(
            qp_type=api.e.IBV_QPT_RC, scq=device.cq, rcq=device.cq, cap=capacity, sq_sig_all=0
        )  # fmt: skip
        attributes = api.QPAttr(port_num=device.port)
        attributes.qp_access_flags = (
            api.e.IBV_ACCESS_LOCAL_WRITE | api.e.IBV_ACCESS_REMOTE_WRITE | api.e.IBV_ACCESS_REMOTE_READ
        )
        attributes.pkey_index = 0
        try:
            self._qp = api.QP(device.pd, kind)
            self._alive = True
            self._qp.to_init(attributes)
        except api.Error as error:
            self.close()
            raise TransferError(f"{device.name}: no queue pair: {error}") from error

    @property
    def number(self) -> int:
        return int(self._qp.qp_num)

    def offer(self, stream_id: str, nic: int, peer_nic: int) -> EndpointOffer:
        device = self._device
        return EndpointOffer(
            stream_id, nic, peer_nic, self.number, self.psn, device.gid.text, device.mtu_bytes, device.lid
        )

    def connect(self, peer: EndpointOffer) -> None:
        """INIT to RTR to RTS, towards the queue pair that was offered."""
        api, config = self._api, self._config
        attributes = api.QPAttr(port_num=self._device.port)
        try:
            attributes.ah_attr = self._address(peer)
            attributes.dest_qp_num, attributes.path_mtu = peer.qpn, self._mtu(peer.mtu)
            attributes.rq_psn, attributes.sq_psn = peer.psn, self.psn
            attributes.max_rd_atomic = attributes.max_dest_rd_atomic = self._device.max_reads
            attributes.min_rnr_timer, attributes.rnr_retry = _RNR_TIMER, _RNR_RETRIES
            attributes.timeout, attributes.retry_cnt = config.rdma_timeout, config.rdma_retry_count
            self._qp.to_rtr(attributes)
            self._qp.to_rts(attributes)
        except api.Error as error:
            raise TransferError(f"{self._device.name}: cannot connect: {error}") from error

    def _address(self, peer: EndpointOffer) -> Any:
        api, device = self._api, self._device
        if device.link_layer == api.e.IBV_LINK_LAYER_INFINIBAND and peer.lid:
            return api.AHAttr(dlid=peer.lid, is_global=0, port_num=device.port)
        route = api.GlobalRoute(
            dgid=api.GID(verbs.full_form(peer.gid)), sgid_index=device.renew_gid().index, hop_limit=64,
            traffic_class=self._config.rdma_traffic_class,
        )  # fmt: skip
        return api.AHAttr(gr=route, is_global=1, port_num=device.port)

    def _mtu(self, theirs: int) -> int:
        """The verbs' code of the smaller one: 1 is 256 bytes, each more doubles."""
        smaller = max(256, min(self._device.mtu_bytes, theirs, 4096))
        return smaller.bit_length() - 8

    def post(self, request: Any) -> None:
        try:
            self._qp.post_send(request)
        except self._api.Error as error:
            raise TransferError(f"{self._device.name}: cannot post: {error}") from error

    def stop(self) -> None:
        """To the error state: everything posted comes back as flushed."""
        if self._alive:
            with contextlib.suppress(self._api.Error):
                self._qp.modify(self._api.QPAttr(qp_state=self._api.e.IBV_QPS_ERR), self._api.e.IBV_QP_STATE)

    def close(self) -> None:
        """Idempotent."""
        if self._alive:
            self._alive = False
            with contextlib.suppress(self._api.Error):
                self._qp.close()
