"""The parts of HTTP that all protocols share: connections, bodies, errors, routes and OpenAPI."""
