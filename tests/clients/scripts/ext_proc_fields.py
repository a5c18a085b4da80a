"""Prints the fields of Envoy's messages of external processing, as `xds-protos` declares them: by
message and field name the number, type and whether it repeats."""

import json

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.type.v3 import http_status_pb2

MODULES = (external_processor_pb2, base_pb2, http_status_pb2)
found = {
    message.name: {field.name: [field.number, field.type] for field in message.fields}
    for module in MODULES
    for message in module.DESCRIPTOR.message_types_by_name.values()
}
enums = {
    "BodySendMode": dict(processing_mode_pb2.ProcessingMode.BodySendMode.items()),
    "HeaderAppendAction": dict(base_pb2.HeaderValueOption.HeaderAppendAction.items()),
}
service = external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"]
print(json.dumps({"messages": found, "enums": enums, "service": service.full_name}))
