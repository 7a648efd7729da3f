/* device_wire.h - the JSON of the device frames, for both sides: device_client.c and device_worker.c. Structs of the same executable travel as
 * bytes in blobs; what people or other tools may want to read travels as JSON. */
#ifndef MOEFORGE_TUNER_DEVICE_WIRE_H
#define MOEFORGE_TUNER_DEVICE_WIRE_H

#include "check.h"
#include "device.h"
#include "device_emu.h"
#include "error.h"
#include "worker.h"

#define DEVICE_ROLE "device"

json_t *wire_info(const struct device_info *info);
/* MF_ERR_INTERNAL names a missing field. */
enum mf_status wire_read_info(const json_t *from, struct device_info *out, struct error *err);
json_t *wire_emulation(const struct device_emulation *emulation);
enum mf_status wire_read_emulation(const json_t *from, struct device_emulation *out, struct error *err);
json_t *wire_check_result(const struct check_result *result);
enum mf_status wire_read_check_result(const json_t *from, struct check_result *out, struct error *err);
/* A number; NAN and infinities become null and come back as NAN. */
json_t *wire_number(double value);
double wire_read_number(const json_t *from);
/* {"ok":false,...} of an error, and what a reply says: MF_OK, or its error. */
json_t *wire_error(const struct error *err);
enum mf_status wire_read_status(const struct frame *reply, struct error *err);

/* After these the child's context cannot be trusted: it exits, and the client is dead. */
bool wire_is_fatal(enum mf_status status);

#endif
