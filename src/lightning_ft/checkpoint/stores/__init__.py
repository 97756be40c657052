"""The drivers: how bytes become a durable object that is whole or absent, on each kind of storage."""
