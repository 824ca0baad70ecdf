"""What the drop-in APIs are made of. Import `mooncake.engine`; docs/drop_in.md is the contract."""
