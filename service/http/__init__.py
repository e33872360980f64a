"""HTTP, whatever the protocol: connections, bodies, error statuses, routes and OpenAPI."""
